"""Does what a page says: runs its code blocks in order, in one directory, and compares what the commands print.

    python scripts/run_page.py docs/tutorial.md [DIRECTORY] [--set-up]

- `python`: run in one process, one block after the other. A block whose first line is `# name.py` is that file.
- `console`: lines that begin with `$ ` are commands, in one shell session; what follows is what they print. Hashes and
  numbers with a decimal point may differ; other numbers may not, unless the line before the block is
  `<!-- numbers differ -->`. A line `...` stands for any lines, and inside a line for any text. The exit code is 0, or
  the one in the command's comment: `$ false  # exit code 1`.
- `toml`, `yaml`, `json`: must be well-formed.

Commands that set up an environment (`git clone`, `pip install`, `make ...`) run only with `--set-up`; otherwise `make`
targets and paths that they name must exist.
"""

import argparse
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

from ejkernel.ops.store import packs

ROOT = Path(__file__).resolve().parent.parent
_DIFFER = "<!-- numbers differ -->\n"
_BLOCK = re.compile(rf"^({_DIFFER})?```([a-z]*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_HASH, _DECIMAL, _INTEGER = r"\b[0-9a-f]{16}\b", r"\d+(?:\.\d+)+(?:e[+-]?\d+)?", r"\d+"
_TOKEN = re.compile(rf"(?P<any>\.\.\.)|(?P<hash>{_HASH})|(?P<decimal>{_DECIMAL})|(?P<integer>{_INTEGER})")
_PATTERNS = {"any": ".*", "hash": _HASH, "decimal": rf"(?:{_DECIMAL}|{_INTEGER}(?:e[+-]?\d+)?)"}
_EXIT_CODE = re.compile(r"\s*# exit code (\d+)$")
_SETS_UP = ("git clone", "cd ", "pip ", "make ", "python -m venv", "python3 -m venv", "source ", ".venv")


_SHELL = """state=${{PAGE_SHELL:-/dev/null}}; [ -f "$state" ] && . "$state"
{}
code=$?; {{ export -p; printf 'cd %q\\n' "$PWD"; }} > "$state"; exit $code"""
"""One shell session for a page: variables and the directory last from one command to the next."""


class PageError(Exception):
    """A page says something that is not so."""


def run_page(page, folder, set_up=False, skip=()):
    """Runs a page's blocks, but for the commands that begin with one of `skip`.

    Raises:
      PageError: A command failed, or printed something else than the page says.
    """
    # The same on every machine: also on one that the package has a pack for.
    packs.from_packages = list
    # One script: then classes have a source, as they have in a reader's file.
    sys.modules["run_page"] = sys.modules[__name__]
    script = ["from run_page import run_command as _run"]
    os.chdir(folder)
    os.environ["PAGE_SHELL"] = str(folder / ".shell")
    for differ, language, text in _BLOCK.findall(page.read_text()):
        # A page may name a directory of the reader's; here it is one of the run's.
        text = text if set_up else text.replace("/tmp/", f"{folder}/")
        if language == "python" and (file := re.match(r"# (\w+\.py)\n", text)):
            Path(file[1]).write_text(text)
        elif language == "python":
            script.append(text)
        elif language == "console":
            told = [(command, expected) for command, expected in commands(text) if not command.startswith(tuple(skip))]
            exact = not differ
            script += [f"_run({command!r}, {expected!r}, {set_up!r}, {exact!r})" for command, expected in told]
        else:
            check_data(language, text)
    (folder / "whole_page.py").write_text("\n".join(script))
    sys.path.insert(0, str(folder))
    runpy.run_path(str(folder / "whole_page.py"), run_name="__main__")


def check_data(language, text):
    if language == "toml":
        tomllib.loads(text)
    elif language == "yaml":
        import yaml

        yaml.safe_load(text)
    elif language == "json":
        json.loads(text)


def commands(text):
    """(command, what it prints) for each command of a block; a backslash continues a command."""
    found = []
    for line in text.replace("\\\n", "").splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif not found:
            raise PageError(f"a console block begins with {line!r}, not with a command: `$ ...`")
        else:
            found[-1][1].append(line)
    return found


def run_command(command, expected, set_up, exact=True):
    code = int(found[1]) if (found := _EXIT_CODE.search(command)) else 0
    command = re.sub(r"\s+#.*$", "", command)
    if command.startswith(_SETS_UP) and not set_up:
        check_set_up(command)
        return
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", _SHELL.format(command)], env=env, capture_output=True, text=True, check=False)
    sys.stdout.flush()
    print(f"$ {command}\n{done.stdout}{done.stderr}", end="", flush=True)
    if done.returncode != code:
        raise PageError(f"{command}: exit code {done.returncode}, the page says {code}\n{done.stderr}")
    # Of a command that works, what it logs beside its output is not what the page is about.
    printed = done.stdout if code == 0 else done.stdout + done.stderr
    if expected and not matches(expected, printed.splitlines(), exact):
        raise PageError(f"{command}: printed\n{printed}\nthe page says\n" + "\n".join(expected))


def matches(expected, got, exact=True):
    """Whether lines are as expected, measured numbers and blanks aside; `...` stands for any number of lines."""
    if not expected:
        return not [line for line in got if line.strip()]
    first, *rest = expected
    if first.strip() == "...":
        return any(matches(rest, got[skip:], exact) for skip in range(len(got) + 1))
    if not got or re.fullmatch(pattern(first, exact), " ".join(got[0].split())) is None:
        return False
    return matches(rest, got[1:], exact)


def pattern(line, exact):
    """What a line of a page stands for: only numbers that count something are as they are."""
    parts, end, line = [], 0, " ".join(line.split())
    for token in _TOKEN.finditer(line):
        kind = "decimal" if token.lastgroup == "integer" and not exact else token.lastgroup
        parts += [re.escape(line[end : token.start()]), _PATTERNS.get(kind, token[0])]
        end = token.end()
    return "".join(parts) + re.escape(line[end:])


def check_set_up(command):
    """What can be said about a set-up command without running it."""
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        missing = [word for word in words[1:] if word not in targets]
    else:
        missing = [word for word in words if word.startswith("requirements") and not (ROOT / word).exists()]
    if missing:
        raise PageError(f"{command}: there is no {', '.join(missing)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=Path())
    parser.add_argument("--set-up", action="store_true")
    parser.add_argument("--skip", action="append", default=[], help="how a command begins that is not run")
    options = parser.parse_args()
    try:
        run_page(options.page.resolve(), options.folder.resolve(), options.set_up, options.skip)
    except PageError as error:
        sys.exit(f"{options.page}: {error}")


if __name__ == "__main__":
    main()
