(() => {
  const plan = JSON.parse(document.getElementById("plan").textContent);
  const slider = document.getElementById("moment");
  const table = document.getElementById("moment-table");
  const figures = [...document.querySelectorAll("figure[data-step]")];
  const steps = figures.map((figure) => plan[figure.dataset.step]);
  const endMs = Math.max(plan.before.step_ms, plan.after.step_ms);

  const size = (bytes) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = 0;
    while (bytes >= 1024 && power < units.length - 1) { bytes /= 1024; power += 1; }
    return `${Number(bytes.toFixed(2))} ${units[power]}`;
  };
  const cell = (row, text, kind = "td", scope = "") => {
    const made = row.appendChild(document.createElement(kind));
    if (scope) made.scope = scope;
    made.textContent = text;
  };
  // Memory is as it was at the last moment before, until the next. One step of the slider covers several moments: the
  // highest of them counts.
  const indexAt = (moments, ms) => {
    const sum = (at) => Object.values(moments.by_choice).reduce((total, bytes) => total + bytes[at], 0);
    let at = 0;
    for (let next = 1; next < moments.ms.length && moments.ms[next] < ms + endMs / slider.max; next += 1) {
      if (moments.ms[next] <= ms || sum(next) > sum(at)) at = next;
    }
    return at;
  };

  const show = () => {
    const part = slider.value / slider.max, ms = part * endMs;
    document.getElementById("moment-ms").textContent = `${ms.toFixed(1)} ms`;
    slider.setAttribute("aria-valuetext", `${ms.toFixed(1)} milliseconds`);
    document.querySelectorAll(".has-cursor .cursor").forEach((line) => { line.style.left = `${part * 100}%`; });
    const view = document.getElementById("view-block").checked ? "by_block" : "by_choice";
    const columns = steps.map((step) => {
      const at = ms > step.step_ms ? -1 : indexAt(step.moments, ms);
      return Object.entries(step.moments[view]).map(([name, bytes]) => [name, at < 0 ? null : bytes[at]]);
    });
    table.replaceChildren();
    const head = table.createTHead().insertRow();
    cell(head, "", "th", "col");
    figures.forEach((figure) => cell(head, figure.querySelector("b").textContent, "th", "col"));
    const body = table.createTBody();
    columns[0].forEach(([name], index) => {
      if (columns.every((column) => !column[index][1])) return;
      const row = body.insertRow();
      cell(row, name, "th", "row");
      columns.forEach((column) => cell(row, column[index][1] === null ? "(over)" : size(column[index][1])));
    });
    const sums = body.insertRow();
    cell(sums, "all", "th", "row");
    columns.forEach((column) => {
      const known = column.map(([, bytes]) => bytes);
      cell(sums, known.includes(null) ? "(over)" : size(known.reduce((sum, bytes) => sum + bytes, 0)));
    });
  };

  const move = (event) => {
    const area = event.currentTarget.getBoundingClientRect();
    slider.value = slider.max * Math.min(Math.max((event.clientX - area.left) / area.width, 0), 1);
    show();
  };
  document.querySelectorAll("figure[data-step] .plot, .lanes .plot").forEach((plot) => {
    plot.classList.add("has-cursor");
    plot.querySelector(".area").addEventListener("pointermove", move);
    plot.querySelector(".area").addEventListener("pointerdown", move);
  });
  document.querySelector(".slider").hidden = false;
  slider.value = Math.floor(slider.max * plan[figures.at(-1).dataset.step].peak_ms / endMs);
  slider.addEventListener("input", show);
  document.querySelectorAll("input[name=view]").forEach((view) => view.addEventListener("change", show));
  show();
})();
