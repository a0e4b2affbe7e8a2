"""Prints what README.md and pyproject.toml state, so that CI runs just that.

readme_command.py test         the commands of the README's block marked <!-- test command -->
readme_command.py oldest-jax   the lower bound of jax in pyproject.toml
"""

import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).parent.parent


def test_command() -> str:
    readme = (ROOT / "README.md").read_text()
    return re.search(r"<!-- test command -->\s*```(?:sh|bash)?\n(.*?)```", readme, re.S)[1].strip()


def oldest_jax() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(d for d in project["dependencies"] if d.startswith("jax>=")).removeprefix("jax>=")


if __name__ == "__main__":
    print({"test": test_command, "oldest-jax": oldest_jax}[sys.argv[1]]())
