def page(schedule, timeline):
    return ""
