"""Which packages an extra of this package needs, and the words that tell a user to install them.

The words never name this package itself: nobody has registered its name, and whoever did would be run.
"""

from __future__ import annotations

_PACKAGES = {
    "torch": "'torch>=2.8'",
    "mindspore": "'mindspore>=2.10,<2.11' 'numpy<2'",
    "planner": "scipy",
    "cli": "rich typer",
    "files": "safetensors",
}


def install_words(extra: str) -> str:
    """Say what to do where the packages of an extra are missing.

    Example:
        >>> install_words("planner")
        "Run `pip install scipy`, or in a clone of hyper_parallel `pip install '.[planner]'`."
    """
    return f"Run `pip install {_PACKAGES[extra]}`, or in a clone of hyper_parallel `pip install '.[{extra}]'`."
