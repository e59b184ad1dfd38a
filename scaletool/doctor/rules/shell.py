"""A shell script as words, commands and variables. Nothing is run.

A variable is followed as far as the script gives it one value; beyond that its name stands for it.
"""

from __future__ import annotations

import ast
import bisect
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """A part of a word. literal: the shell leaves its `$` alone. split: it stands outside of double quotes."""

    text: str
    literal: bool = False
    split: bool = False
    array: bool = False


class Word(NamedTuple):
    line: int
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def bare(self) -> str:
        """Its text where nothing of it is quoted, so that it can be a keyword."""
        return self.text if all(piece.split and not piece.array for piece in self.pieces) else ""


class ShellCommand(NamedTuple):
    """end: what ends it, "&" or "|" say most. nested: inside of a loop, a condition or a function."""

    line: int
    words: tuple[Word, ...]
    end: str
    nested: bool
    in_function: bool

    @property
    def is_background(self) -> bool:
        return self.end == "&"

    @property
    def is_piped(self) -> bool:
        return self.end in ("|", "|&")


OPERATOR = re.compile(r"&>>?|\d*(?:<<<|<<-?|<&|<>|>>|>&|>\||>(?!\()|<(?!\())|;;&?|;&|&&|\|\||\|&|[;&|()]")
ORDINARY = re.compile(r"[^\s;&|<>()\\'\"$`]+")
REDIRECTION = re.compile(r"&>|\d*[<>]")
OPENING, CLOSING = {"if", "while", "until", "for", "select", "case"}, {"fi", "done", "esac"}


def closed(text: str, at: int) -> int:
    """Where the bracket that opens at `at` has been closed; the text's end where it is not."""
    opening, closing = text[at], {"(": ")", "{": "}"}[text[at]]
    depth = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
        elif char == "'":
            at = (text.find("'", at + 1) + 1) or len(text)
        elif char == '"':
            at = quote_closed(text, at)
        elif char == "#" and opening == "(" and text[at - 1] in " \t\n(":
            at = (text.find("\n", at) + 1) or len(text)
        else:
            depth += (char == opening) - (char == closing)
            at += 1
            if not depth:
                return at
    return len(text)


def quote_closed(text: str, at: int) -> int:
    """Where the double quote that opens at `at` has been closed."""
    at += 1
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text.startswith("$(", at):
            at = closed(text, at + 1)
        elif text[at] == '"':
            return at + 1
        else:
            at += 1
    return len(text)


def _found(text: str, sought: str, at: int) -> int:
    """Where it stands next, or the text's end."""
    place = text.find(sought, at)
    return len(text) if place < 0 else place


class Lexer:
    """A shell text as commands."""

    def __init__(self, text: str, line: int = 1) -> None:
        self.text, self.at, self.first_line = text, 0, line
        self.breaks = [found.start() for found in re.finditer("\n", text)]
        self.words: list[Word] = []
        self.commands: list[ShellCommand] = []
        self.nesting: list[str] = []
        self.redirection: str | None = None
        self.here_ends: list[str] = []
        self.here_lines: set[int] = set()
        self.defines = False
        self._read()

    def line(self) -> int:
        return self.first_line + bisect.bisect_left(self.breaks, self.at)

    def _read(self) -> None:
        text = self.text
        while self.at < len(text):
            char = text[self.at]
            if char in " \t\r":
                self.at += 1
            elif char == "\\" and re.match(r"\\\r?\n", text[self.at : self.at + 3]):
                self.at = text.index("\n", self.at) + 1
            elif char == "#":
                self.at = _found(text, "\n", self.at)
            elif char == "\n":
                self._end("\n")
                self.at += 1
                self._skip_here_documents()
            elif text.startswith("((", self.at) and len(self.words) < 2:
                self.at = closed(text, self.at)
            elif found := OPERATOR.match(text, self.at):
                self._operator(found[0])
            else:
                self._word()
        self._end("")

    def _skip_here_documents(self) -> None:
        for end in self.here_ends:
            while self.at < len(self.text):
                self.here_lines.add(self.line())
                stop = _found(self.text, "\n", self.at)
                content = self.text[self.at : stop]
                self.at = stop + 1
                if content.strip("\t\r ") == end:
                    break
        self.here_ends = []

    def _operator(self, found: str) -> None:
        self.at += len(found)
        if REDIRECTION.match(found):
            self.redirection = found.lstrip("0123456789")
        elif found == "(":
            rest = re.match(r"\s*\)", self.text[self.at : self.at + 9])
            if self.words and rest:  # name(): a function
                self.at += rest.end()
                self.words, self.defines = [], True
            elif not self.words:
                self._open("(")
        elif found == ")":
            self._end(")")
            if "(" in self.nesting:
                self._close()
        else:
            self._end(found)

    def _open(self, name: str) -> None:
        self.nesting.append("function" if self.defines else name)
        self.defines = False

    def _close(self) -> None:
        if self.nesting:
            self.nesting.pop()

    def _end(self, end: str) -> None:
        """Close the command, without the keywords that it begins with."""
        words, self.words, self.redirection = self.words, [], None
        while words:
            first = words[0].bare
            if first in OPENING:
                self._open(first)
                if first in ("for", "select", "case"):
                    break
            elif first == "function":
                self.defines = True
                words = words[1:]
            elif first == "{":
                self._open("{")
            elif first in CLOSING or first == "}":
                self._close()
            elif first not in ("then", "do", "else", "elif", "!", "time"):
                break
            words = words[1:]
        if words:
            nested, in_function = bool(self.nesting), "function" in self.nesting
            self.commands.append(ShellCommand(words[0].line, tuple(words), end, nested, in_function))

    def _word(self) -> None:
        line, start = self.line(), self.at
        pieces: list[Piece] = []
        text = self.text
        while self.at < len(text):
            char = text[self.at]
            if char in "<>" and self.at == start:  # <(...)
                self._piece(pieces, closed(text, self.at + 1), split=True)
            elif char == "(" and pieces and pieces[-1].text.endswith("="):
                end = closed(text, self.at)
                pieces.append(Piece(text[self.at + 1 : end - 1], array=True))
                self.at = end
            elif char in " \t\r\n;&|<>()":
                break
            else:
                self._part(pieces, char)
        word = Word(line, tuple(pieces))
        if self.redirection is None:
            self.words.append(word)
        elif self.redirection in ("<<", "<<-"):
            self.here_ends.append(word.text)
        self.redirection = None

    def _part(self, pieces: list[Piece], char: str) -> None:
        text = self.text
        if char == "\\":
            if text[self.at + 1 : self.at + 2] not in ("\n", ""):
                pieces.append(Piece(text[self.at + 1], literal=True))
            self.at += 2
        elif char == "'" or text.startswith("$'", self.at):
            start = text.index("'", self.at) + 1
            end = _found(text, "'", start)
            pieces.append(Piece(text[start:end], literal=True))
            self.at = end + 1
        elif char == '"':
            end = quote_closed(text, self.at)
            pieces.extend(_double_quoted(text[self.at + 1 : end - 1]))
            self.at = end
        elif text.startswith(("$(", "${"), self.at):
            self._piece(pieces, closed(text, self.at + 1), split=True)
        elif char == "`":
            self._piece(pieces, (text.find("`", self.at + 1) + 1) or len(text), split=True)
        elif char == "$":
            name = re.compile(r"\$(\w+|[@*#?$!-])?").match(text, self.at)
            self._piece(pieces, name.end() if name else self.at + 1, split=True)
        else:
            ordinary = ORDINARY.match(text, self.at)
            self._piece(pieces, ordinary.end() if ordinary else self.at + 1, split=True)

    def _piece(self, pieces: list[Piece], end: int, *, split: bool) -> None:
        pieces.append(Piece(self.text[self.at : end], split=split))
        self.at = end


def _double_quoted(text: str) -> Iterator[Piece]:
    yield Piece("")  # a word even where nothing stands in it
    start = 0
    for found in re.finditer(r"\\([$`\"\\]|\r?\n)", text):
        if found.start() >= start:
            yield Piece(text[start : found.start()])
            if not found[1].endswith("\n"):
                yield Piece(found[1], literal=True)
            start = found.end()
    yield Piece(text[start:])


# --- variables

BEGIN, END, SPACE, EARLY = "\ue000", "\ue001", "\ue002", "\ue003"
"""Round what is not known when the script is read; EARLY: a rank that the batch shell fills in, always with 0."""
UNKNOWN = re.compile(f"[{BEGIN}{EARLY}]([^{BEGIN}{EARLY}{END}]*){END}")
RANKS = ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
DECLARING = {"export", "declare", "local", "readonly", "typeset"}
LONGEST_VALUE, DEEPEST_VALUE = 20_000, 12


class Assigned(NamedTuple):
    name: str
    word: Word | None
    """None: nobody knows."""
    line: int
    exported: bool
    nested: bool
    prefix: bool = False
    appended: bool = False


def unknown(text: str) -> str:
    return BEGIN + re.sub(r"\s", SPACE, text) + END


def shown(text: str) -> str:
    """A value as the script writes it."""
    return re.sub(f"[{BEGIN}{END}{EARLY}]", "", text).replace(SPACE, " ").strip()


def assignments(command: ShellCommand) -> Iterator[Assigned]:
    """What a command assigns, for itself (prefix) or for the shell."""
    words = command.words
    first = words[0].bare
    if first in ("for", "select") and len(words) > 1:
        yield Assigned(words[1].text, None, command.line, False, True)
    elif first in ("read", "mapfile", "readarray", "getopts", "printf", "let", "unset"):
        for word in words[1:]:
            if re.fullmatch(r"[A-Za-z_]\w*", word.text):
                yield Assigned(word.text, None, command.line, False, command.nested)
    elif first in DECLARING:
        flags = [word.text for word in words[1:] if word.text.startswith("-")]
        exported = first == "export" or any("x" in flag for flag in flags)
        for word in words[1:]:
            yield from _assigned(word, command, exported)
            if exported and re.fullmatch(r"[A-Za-z_]\w*", word.text):
                yield Assigned(word.text, None, command.line, True, command.nested, appended=True)
    else:
        leading = []
        for word in words:
            if not ASSIGNMENT.match(word.text):
                break
            leading.append(word)
        for word in leading:
            for each in _assigned(word, command, False):
                yield each._replace(prefix=len(leading) < len(words))


def _assigned(word: Word, command: ShellCommand, exported: bool) -> Iterator[Assigned]:
    found = ASSIGNMENT.match(word.text)
    if found and word.pieces[0].text.startswith(found[0]):
        first = word.pieces[0]._replace(text=word.pieces[0].text[found.end() :])
        value = Word(word.line, (first, *word.pieces[1:]))
        yield Assigned(found[1], value, command.line, exported, command.nested, appended=bool(found[2]))


class Scope:
    """Variables of the batch shell, or of a shell inside of a step."""

    def __init__(self, commands: Sequence[ShellCommand], slurm: Mapping[str, str], parent: Scope | None = None) -> None:
        self.slurm, self.parent = slurm, parent
        self.all = [each for command in commands for each in assignments(command)]
        self.exported = {each.name for each in self.all if each.exported}
        self.values: dict[str, list[Word] | None] = {}
        self.known: dict[str, str | None] = {}
        for each in self.all:
            self._add(each)

    def _add(self, each: Assigned) -> None:
        if each.prefix or (each.word is None and each.appended):
            return
        earlier = self.values.get(each.name)
        if each.word is None or each.nested or (each.name in self.values and not (each.appended and earlier)):
            self.values[each.name] = None
        else:
            self.values[each.name] = [*(earlier or []), each.word]

    def lookup(self, name: str, depth: int) -> str | None:
        """The value of a variable, None where nothing in the script gives it one."""
        if name not in self.known:
            self.known[name] = self._lookup(name, depth)
        return self.known[name]

    def _lookup(self, name: str, depth: int) -> str | None:
        if name in self.values:
            words = self.values[name]
            if words is None or depth > DEEPEST_VALUE:
                return unknown(f"${name}")
            return "".join(self.expand(word, depth + 1) for word in words)
        if self.parent is not None and name not in RANKS:
            return self.parent.lookup(name, depth)
        if name in RANKS:
            return unknown(f"${name}") if self.parent is not None else f"{EARLY}${name}{END}"
        return self.slurm.get(name)

    def expand(self, word: Word, depth: int = 0) -> str:
        """The text of a word after the shell has looked at it."""
        parts = []
        for piece in word.pieces:
            if piece.literal:
                parts.append(piece.text)
            elif piece.array:
                inner = Lexer(piece.text).commands
                parts.append(" ".join(self.expand(each, depth + 1) for command in inner for each in command.words))
            else:
                parts.append(self._expand_text(piece.text, depth))
        return "".join(parts)[:LONGEST_VALUE]

    def _expand_text(self, text: str, depth: int) -> str:
        parts, at, size = [], 0, 0
        while at < len(text) and size < LONGEST_VALUE:
            found = re.compile(r"[$`]").search(text, at)
            if not found:
                break
            parts.append(text[at : found.start()])
            at, value = self._one(text, found.start(), depth)
            parts.append(value)
            size += len(value)
        return "".join(parts) + text[at:]

    def _one(self, text: str, at: int, depth: int) -> tuple[int, str]:
        """An expansion that begins at `at`: where it ends, and its value."""
        if text[at] == "`":
            end = (text.find("`", at + 1) + 1) or len(text)
            return end, unknown(text[at:end])
        if text.startswith("$((", at):
            end = closed(text, at + 1)
            return end, self._arithmetic(text[at + 3 : max(end - 2, at + 3)], depth)
        if text.startswith("$(", at):
            end = closed(text, at + 1)
            return end, unknown(text[at:end])
        if text.startswith("${", at):
            end = closed(text, at + 1)
            found = re.fullmatch(r"(\w+)(\[[@*]\])?((?::?[-?]|:?=).*)?", text[at + 2 : end - 1], re.DOTALL)
            value = self.lookup(found[1], depth) if found else None
            return end, value if value is not None else unknown(text[at:end])
        name = re.compile(r"\$(\w+|[@*#?$!-])").match(text, at)
        if not name:
            return at + 1, "$"
        value = self.lookup(name[1], depth)
        return name.end(), value if value is not None else unknown(name[0])

    def _arithmetic(self, text: str, depth: int) -> str:
        def value(found: re.Match[str]) -> str:
            known = self.lookup(found[1], depth + 1)
            return shown(known) if known is not None else found[1]

        if depth > DEEPEST_VALUE:
            return unknown(text)
        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)(?::?[-?][^}]*)?\}?", value, text)
        number = arithmetic(filled)
        return unknown(f"$(({filled}))") if number is None else str(number)

    def split(self, words: Sequence[Word]) -> list[str]:
        """Words as a command gets them: unquoted variables and arrays fall into several."""
        found: list[str] = []
        for word in words:
            text = self.expand(word)
            falls_apart = any("$" in piece.text and not piece.literal for piece in word.pieces) and (
                any(piece.split and "$" in piece.text for piece in word.pieces) or "[@]" in word.text
            )
            found.extend(text.split() if falls_apart else [text])
        return found


OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def arithmetic(text: str) -> int | None:
    """A sum or product of plain numbers."""
    if len(text) > 80 or not re.fullmatch(r"[\d\s+\-*/%()]+", text):
        return None
    try:
        return _computed(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        return None


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_computed(node.left), _computed(node.right))
    raise ValueError("not plain")


def number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else None
