# SPDX-License-Identifier: Apache-2.0
"""Commands of this repository in code blocks and backticks: programs, sub-commands, targets and flags that exist.

A flag of ``vllm-overlay`` is its parser's. One of another program exists when its file, or a module of ours that it
imports, has it as a string. Nothing is run.
"""

import argparse
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile
from pathlib import Path

from devtools.docs.names import PACKAGES, is_known
from devtools.docs.page import Finding, Page
from vllm_overlay.cli.command_line import COMMANDS

_SHELL = ("", "bash", "sh", "shell", "console")
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")
_IMPORT = re.compile(rf"^\s*(?:from|import) ((?:{'|'.join(PACKAGES)})[\w.]*)", re.MULTILINE)
_OPTION = re.compile(r"\"(--[a-z][a-z0-9-]*)\"")
_BEFORE = ("sudo", "time", "exec", "nohup", "env")


@dataclass(slots=True, frozen=True)
class Command:
    line: int
    words: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        """Its long options up to ``--``, without their values."""
        words = self.words[: self.words.index("--")] if "--" in self.words else self.words
        return [word.split("=")[0] for word in words if re.match(r"--[a-z]", word)]


def wrong_commands(page: Page) -> Iterator[Finding]:
    for command in commands(page):
        if what := problem_of(page.root, command):
            yield Finding(page.name, command.line, f"{' '.join(command.words)[:60]!r}: {what}")


def commands(page: Page) -> Iterator[Command]:
    """All that could be commands; most backticks are none, and have no problem."""
    for block in page.code_blocks:
        if block.language in _SHELL:
            yield from commands_of_script(block.line, block.text)
    for span in page.code_spans:
        yield from _commands_of_line(span.line, span.text)


def commands_of_script(line: int, script: str) -> Iterator[Command]:
    """The commands of a block of shell lines that begins at ``line``: quotes and ``\\`` go on over lines."""
    begin, pending = line, ""
    for number, text in enumerate(script.splitlines(), line):
        if not pending:
            begin = number
        pending += text.removeprefix("$ ") if not pending else "\n" + text
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            shlex.split(pending, comments=True)
        except ValueError:  # a quote is not closed yet
            continue
        yield from _commands_of_line(begin, pending)
        pending = ""
    yield from _commands_of_line(begin, pending)


def _commands_of_line(line: int, text: str) -> Iterator[Command]:
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;()")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:
        words = text.split()
    command: list[str] = []
    for word in [*words, ";"]:
        if word and set(word) <= set("|&;()"):
            own = tuple(dropwhile(lambda one: _ASSIGNMENT.match(one) or one in _BEFORE, command))
            if own:
                yield Command(line, own)
            command = []
        else:
            command.append(word)


def problem_of(root: Path, command: Command) -> str | None:
    """What is wrong with a command of this repository; None also for any other command."""
    program = command.words[0].rsplit("/", 1)[-1]
    if program == "make":
        return _problem_of_make(root, command.words[1:])
    if program == "vllm-overlay":
        return _problem_of_overlay(root, command, command.words[1:])
    if re.fullmatch(r"python(3(\.\d+)?)?", program):
        return _problem_of_python(root, command)
    return None


def _problem_of_make(root: Path, words: Sequence[str]) -> str | None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))
    for word in words:
        name, equals, _ = word.partition("=")
        if equals and not re.search(rf"\$\({name}\)|ifdef {name}\b", makefile):
            return f"the Makefile does not use {name}"
        if not equals and re.fullmatch(r"[a-z][a-z0-9-]*", name) and name not in targets:
            return f"the Makefile has no target {name}"
    return None


def _problem_of_overlay(root: Path, command: Command, words: Sequence[str]) -> str | None:
    names = [word for word in words if not word.startswith("-")]
    if not names or not re.fullmatch(r"[a-z]+", names[0]):
        return None
    parser = argparse.ArgumentParser()
    for each in COMMANDS:
        if each.name == names[0]:
            each.add_arguments(parser)
            own = parser._option_string_actions
            passed_on = [flag for flag in command.flags if each.passes_on and is_known(root, flag)]
            return _unknown_flag(command, {*own, *passed_on})
    return f"there is no sub-command {names[0]}"


def _problem_of_python(root: Path, command: Command) -> str | None:
    words = list(command.words[1:])
    if words[:1] == ["-m"] and len(words) > 1:
        module = words[1]
        if module == "vllm_overlay":
            return _problem_of_overlay(root, command, words[2:])
        if module.split(".")[0] not in PACKAGES:
            return None
        file = _file_of(root, module)
        if file is None:
            return f"there is no module {module}"
        if file.name == "__init__.py" and not (file := file.with_name("__main__.py")).is_file():
            return f"{module} has no __main__.py"
        return _unknown_flag(command, _flags(root, file))
    if words and words[0].endswith(".py") and words[0].split("/")[0] in PACKAGES:
        file = root / words[0]
        return _unknown_flag(command, _flags(root, file)) if file.is_file() else f"there is no {words[0]}"
    return None


def _unknown_flag(command: Command, known: Collection[str]) -> str | None:
    unknown = [flag for flag in command.flags if flag not in known and flag != "--help"]
    return f"it has no {unknown[0]}" if unknown else None


@cache
def _flags(root: Path, file: Path) -> frozenset[str]:
    """The options of a program: those of its file and of the modules of ours that it imports."""
    texts: dict[Path, str] = {}
    waiting = [file]
    while waiting:
        each = waiting.pop()
        if each not in texts:
            texts[each] = each.read_text(encoding="utf-8")
            imported = (_file_of(root, name) for name in _IMPORT.findall(texts[each]))
            waiting += [path for path in imported if path is not None]
    return frozenset(flag for text in texts.values() for flag in _OPTION.findall(text))


def _file_of(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py", path / "__main__.py"):
        if file.is_file():
            return file
    return None
