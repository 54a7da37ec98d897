"""`hyper-parallel doctor`: what a machine offers, and which known traps it has.

`collect` looks at the machine and gives `facts`. `checks` makes findings of facts; `show` makes a page of both and
`document` a JSON document: none of the three looks at the machine again. `outcomes` is the table of the platform
operations.
"""
