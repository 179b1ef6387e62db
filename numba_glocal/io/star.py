"""A small strict reader and writer of STAR files. A row is a line, as in RELION.

Tokens are kept byte for byte, quotes included, with every column, block and their order. What is not clearly a STAR file of
the field (wrong number of columns, a label twice, two blocks of one name ...) is refused with file and line.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ListError
from .paths import whole_file

# a quote closes only where a blank follows, so that 'a'b' is one token
_TOKEN = re.compile(r"""(?:"[^\n]*?"(?=[ \t\r\f\v]|$)|'[^\n]*?'(?=[ \t\r\f\v]|$)|[^ \t\r\f\v]+)""")
_BLANKS = " \t\r\n\f\v"
_UNSAFE_FIRST = frozenset("_#\"'dDlL")


@dataclass(slots=True)
class StarBlock:
    """One ``data_`` block: key/value pairs, a loop, or pairs followed by a loop.

    Attributes
    ----------
    name : str
        What follows ``data_``; may be empty.
    pairs : dict of str to str
        Keys (without the leading underscore) and their tokens.
    labels : list of str
        Column labels of the loop, without the leading underscore.
    columns : list of list of str
        Tokens of each column, quotes included; all of one length.
    has_loop : bool
        Whether there is a loop, perhaps one without rows.
    comments : list of str
        Comment lines that stand before the block.
    path : str
        The file, for messages.
    line : int
        Line of ``data_`` in the file (0 for a block made in memory).
    row_lines : sequence of int
        Line of each row (empty for a block made in memory).
    """

    name: str
    pairs: dict[str, str] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    columns: list[list[str]] = field(default_factory=list)
    has_loop: bool = False
    comments: list[str] = field(default_factory=list)
    path: str = ""
    line: int = 0
    row_lines: Sequence[int] = ()

    @classmethod
    def from_columns(cls, name: str, columns: Mapping[str, Iterable[str]]) -> StarBlock:
        """A loop made of texts, column by column; texts are quoted where they must be."""
        block = cls(name, has_loop=True)
        for label, texts in columns.items():
            block.set_column(label, texts)
        return block

    @classmethod
    def from_pairs(cls, name: str, pairs: Mapping[str, str]) -> StarBlock:
        """A block of key/value pairs made of texts."""
        return cls(name, pairs={key.removeprefix("_"): quote(text) for key, text in pairs.items()})

    @property
    def n_rows(self) -> int:
        """Number of rows of the loop."""
        return len(self.columns[0]) if self.columns else 0

    def __contains__(self, label: str) -> bool:
        return label in self.labels or label in self.pairs

    def tokens(self, label: str) -> list[str]:
        """The tokens of a column as they stand in the file."""
        if label not in self.labels:
            raise ListError(f"{self.where()}: no column _{label}")
        return self.columns[self.labels.index(label)]

    def texts(self, label: str) -> list[str]:
        """The values of a column, quotes removed."""
        tokens = self.tokens(label)
        return [unquote(t) if t[0] in "\"'" else t for t in tokens]

    def value(self, key: str) -> str:
        """The value of a key/value pair, quotes removed."""
        if key not in self.pairs:
            raise ListError(f"{self.where()}: no key _{key}")
        return unquote(self.pairs[key])

    def floats(self, label: str) -> NDArray[np.float64]:
        """A column as finite numbers; a token that is not one is refused with its line."""
        texts = self.texts(label)
        try:
            values = np.fromiter(map(float, texts), dtype=np.float64, count=len(texts))
        except ValueError:
            row = next(i for i, t in enumerate(texts) if not _is_float(t))
        else:
            if np.isfinite(values).all():
                return values
            row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ListError(f"{self.where(row)}: _{label} is '{texts[row]}', expected a finite number")

    def set_column(self, label: str, texts: Iterable[str]) -> None:
        """Replace a column, or add it at the end."""
        label = label.removeprefix("_")
        tokens = [quote(t) for t in texts]
        if self.columns and len(tokens) != self.n_rows:
            raise ListError(f"{self.where()}: column _{label} has {len(tokens)} values, expected {self.n_rows}")
        self.has_loop = True
        if label in self.labels:
            self.columns[self.labels.index(label)] = tokens
        else:
            self.labels.append(label)
            self.columns.append(tokens)

    def take(self, index: NDArray[np.integer[Any]] | Sequence[int]) -> StarBlock:
        """The block with the rows at `index`, in that order."""
        rows = np.asarray(index, dtype=np.intp).tolist()
        lines = self.row_lines
        return StarBlock(
            self.name,
            dict(self.pairs),
            list(self.labels),
            [[column[i] for i in rows] for column in self.columns],
            self.has_loop,
            list(self.comments),
            self.path,
            self.line,
            array("q", [lines[i] for i in rows]) if len(lines) else (),
        )

    def where(self, row: int | None = None) -> str:
        """File and line of the block, or of one of its rows, for messages."""
        line = self.line if row is None else (self.row_lines[row] if len(self.row_lines) else 0)
        if not line:
            return f"{self.path or 'list'}, data_{self.name}" + ("" if row is None else f", row {row + 1}")
        return f"{self.path}:{line}"


@dataclass(slots=True)
class StarDocument:
    """The blocks of a STAR file, in order.

    Attributes
    ----------
    blocks : list of StarBlock
    path : str
        The file it was read from ("" when made in memory).
    """

    blocks: list[StarBlock] = field(default_factory=list)
    path: str = ""

    def __contains__(self, name: str) -> bool:
        return any(block.name == name for block in self.blocks)

    def __getitem__(self, name: str) -> StarBlock:
        for block in self.blocks:
            if block.name == name:
                return block
        found = ", ".join(f"data_{block.name}" for block in self.blocks)
        raise ListError(f"{self.path}: no block data_{name}; found {found}")


def quote(text: str) -> str:
    """The token of a text: itself, or quoted where a blank, a quote or a keyword would change its meaning."""
    if text and text[0] not in "\"'#_" and not _has_blank(text) and text.lower() != "loop_":
        return text
    if "\n" not in text and "\r" not in text:
        for mark in sorted("\"'", key=text.count):  # the rarer one first
            token = f"{mark}{text}{mark}"
            if _TOKEN.fullmatch(token) and _TOKEN.findall(token) == [token]:
                return token
    raise ListError(f"cannot write {text!r} as one STAR value")


def unquote(token: str) -> str:
    """The text of a token."""
    if len(token) >= 2 and token[0] in "\"'" and token[-1] == token[0]:
        return token[1:-1]
    return token


def read_star(path: str | Path) -> StarDocument:
    """Read a STAR file.

    Parameters
    ----------
    path : path
        UTF-8 text, with or without byte order mark.

    Returns
    -------
    StarDocument

    Raises
    ------
    ListError
        With file and line, for anything that is not a well-formed list.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not raw.strip():
        raise ListError(f"{path}: the file is empty")
    if b"\0" in raw:
        raise ListError(f"{path}: not a STAR file; it is binary")
    # surrogateescape keeps bytes that are not UTF-8 (old file names) as they are
    return parse_star(raw.decode("utf-8-sig", "surrogateescape"), str(path))


def parse_star(text: str, path: str = "") -> StarDocument:
    """Parse the text of a STAR file; `path` is for messages. See `read_star`."""
    return _Parser(text, path).document()


def write_star(path: str | Path, document: StarDocument) -> None:
    """Write a STAR file, whole or not at all; tokens as they are."""
    with whole_file(path) as handle:
        for block in document.blocks:
            handle.write(_block_text(block).encode("utf-8", "surrogateescape"))


def _block_text(block: StarBlock) -> str:
    lines = ["", *block.comments, f"data_{block.name}", ""]
    if block.pairs:
        width = max(map(len, block.pairs))
        lines += [f"_{key:<{width}}  {token}" for key, token in block.pairs.items()]
        lines.append("")
    if block.has_loop:
        lines.append("loop_")
        lines += [f"_{label} #{i}" for i, label in enumerate(block.labels, 1)]
        # the strict zip refuses columns of different lengths before anything is replaced
        lines += map("\t".join, zip(*block.columns, strict=True))
        lines.append("")
    return "\n".join(lines) + "\n"


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _has_blank(text: str) -> bool:
    return any(c in text for c in _BLANKS)


def _split_ascii(line: str) -> list[str]:
    """Split at ASCII blanks only: a name may hold a no-break space, at which `str.split` would cut."""
    return [t.decode("utf-8", "surrogateescape") for t in line.encode("utf-8", "surrogateescape").split()]


def _is_comment(tokens: Sequence[str]) -> bool:
    """A comment has a blank (or a second #) behind its #; ``#1.mrc`` is a value."""
    return tokens[0] == "#" or tokens[0].startswith("##")


class _Parser:
    """One pass over the lines. Kept apart from the document so that no state outlives a file."""

    def __init__(self, text: str, path: str) -> None:
        if "\n" not in text:
            text = text.replace("\r", "\n")
        self.path = path
        self.lines = text.split("\n")
        usual = text.isascii() and not any(c in text for c in "\x1c\x1d\x1e\x1f")
        self.split: Callable[[str], list[str]] = str.split if usual else _split_ascii
        self.has_quotes = '"' in text or "'" in text
        self.blocks: list[StarBlock] = []
        self.comments: list[str] = []

    def fail(self, index: int, message: str) -> ListError:
        return ListError(f"{self.path}:{index + 1}: {message}")

    def tokens(self, index: int) -> list[str]:
        """Tokens of a line; none for a blank line."""
        line = self.lines[index]
        if not self.has_quotes or ('"' not in line and "'" not in line):
            return self.split(line)
        tokens = _TOKEN.findall(line)
        if tokens and _is_comment(tokens):
            return tokens
        for i, token in enumerate(tokens):
            if token[0] in "\"'" and (len(token) < 2 or token[-1] != token[0]):
                raise self.fail(index, f"the quote that opens {token} is not closed")
            if i and token == "#":
                return tokens[:i]  # an apostrophe in a trailing comment is not a quote
        return tokens

    def document(self) -> StarDocument:
        i, n = 0, len(self.lines)
        while i < n:
            tokens = self.tokens(i)
            if not tokens:
                i += 1
            elif tokens[0].startswith("#"):
                self.comments.append(self.lines[i].strip())
                i += 1
            elif tokens[0].startswith("data_") and (len(tokens) == 1 or tokens[1].startswith("#")):
                i = self.block(i, tokens[0][5:])
            else:
                shown = self.lines[i].strip()[:60]
                if self.blocks:
                    raise self.fail(i, f"'{shown}' stands outside of a loop")
                raise self.fail(i, f"not a STAR file: expected data_, found '{shown}'")
        if not self.blocks:
            raise ListError(f"{self.path}: not a STAR file: no data_ block, only comments")
        return StarDocument(self.blocks, self.path)

    def block(self, i: int, name: str) -> int:
        """Read the block whose ``data_`` line is `i`; return the line after it."""
        for other in self.blocks:
            if other.name == name:
                raise self.fail(i, f"block data_{name} stands twice, first at line {other.line}")
        block = StarBlock(name, comments=self.comments, path=self.path, line=i + 1)
        self.blocks.append(block)
        self.comments = []
        lines_of: dict[str, int] = {}
        i += 1
        while i < len(self.lines):
            tokens = self.tokens(i)
            if not tokens:
                i += 1
            elif tokens[0].startswith("#"):
                self.comments.append(self.lines[i].strip())
                i += 1
            elif tokens[0] == "loop_":
                if len(tokens) > 1 and not tokens[1].startswith("#"):
                    raise self.fail(i, f"'{tokens[1]}' behind loop_")
                self.keep_comments(block)
                i = self.loop(i, block, lines_of)
            elif tokens[0].lower() == "loop_":
                raise self.fail(i, f"{tokens[0]} must be written loop_, in small letters")
            elif tokens[0].startswith("_"):
                self.keep_comments(block)
                self.pair(i, tokens, block, lines_of)
                i += 1
            elif tokens[0].lower().startswith("data_"):
                if not tokens[0].startswith("data_"):
                    raise self.fail(i, f"{tokens[0]} must begin with data_, in small letters")
                break
            else:
                raise self.fail(i, f"'{self.lines[i].strip()[:60]}' stands outside of a loop")
        return i

    def keep_comments(self, block: StarBlock) -> None:
        block.comments = [*block.comments, *self.comments]
        self.comments = []

    def pair(self, i: int, tokens: list[str], block: StarBlock, lines_of: dict[str, int]) -> None:
        label = tokens[0][1:]
        self.new_label(i, label, lines_of)
        if len(tokens) == 1 or tokens[1] == "#":
            raise self.fail(i, f"key _{label} has no value")
        if len(tokens) > 2 and not tokens[2].startswith("#"):
            raise self.fail(i, f"key _{label}: expected 1 value, found {len(tokens) - 1}")
        block.pairs[label] = tokens[1]

    def new_label(self, i: int, label: str, lines_of: dict[str, int]) -> None:
        if not label:
            raise self.fail(i, "a label without a name")
        if label in lines_of:
            raise self.fail(i, f"label _{label} stands twice, first at line {lines_of[label]}")
        lines_of[label] = i + 1

    def loop(self, i: int, block: StarBlock, lines_of: dict[str, int]) -> int:
        """Read labels and rows of the loop whose ``loop_`` line is `i`; return the line after it."""
        start = i
        labels: list[str] = []
        i += 1
        while i < len(self.lines):
            tokens = self.tokens(i)
            if tokens and tokens[0].startswith("_"):
                self.new_label(i, tokens[0][1:], lines_of)
                if len(tokens) > 1 and not tokens[1].startswith("#"):
                    raise self.fail(i, f"label {tokens[0]} is followed by '{tokens[1]}', expected nothing or #{len(labels) + 1}")
                labels.append(tokens[0][1:])
            elif tokens and not self.is_comment_among_labels(i, tokens):
                break
            i += 1
        if block.has_loop:
            raise self.fail(start, f"a second loop_ in block data_{block.name}, expected one table a block")
        if not labels:
            raise self.fail(start, "loop_ without labels")
        flat, row_lines, i = self.rows(i, len(labels))
        block.has_loop = True
        block.labels = labels
        block.columns = [flat[k :: len(labels)] for k in range(len(labels))]
        block.row_lines = row_lines
        return i

    def rows(self, i: int, width: int) -> tuple[list[str], array[int], int]:
        flat: list[str] = []
        row_lines = array("q")
        extend, append, split, unsafe = flat.extend, row_lines.append, self.split, _UNSAFE_FIRST
        simple = not self.has_quotes
        for index in range(i, len(self.lines)):
            # this is the line of code that runs a million times: the usual row leaves here
            tokens = split(self.lines[index])
            if simple and len(tokens) == width and tokens[0][0] not in unsafe:
                extend(tokens)
                append(index + 1)
                continue
            if not tokens:
                continue
            if not simple:
                tokens = self.tokens(index)
            if _is_comment(tokens):
                # the comment lines before the next block belong to it
                if self.ends_rows(index):
                    return flat, row_lines, index
                continue
            if self.is_keyword(index, tokens, width):
                return flat, row_lines, index
            if len(tokens) > width and tokens[width].startswith("#"):
                tokens = tokens[:width]
            if len(tokens) != width:
                hint = "; a comment needs a blank behind its #" if tokens[0].startswith("#") else ""
                raise self.fail(index, f"expected {width} columns, found {len(tokens)}{hint}")
            extend(tokens)
            append(index + 1)
        return flat, row_lines, len(self.lines)

    def is_comment_among_labels(self, index: int, tokens: list[str]) -> bool:
        """``#1.mrc`` behind the last label is a row; before a label it can only be a comment."""
        return _is_comment(tokens) or (tokens[0].startswith("#") and "".join(self.next_content(index + 1)).startswith("_"))

    def next_content(self, index: int) -> list[str]:
        """Tokens of the first line from `index` on that is neither blank nor a comment."""
        for i in range(index, len(self.lines)):
            tokens = self.split(self.lines[i])
            if tokens and not tokens[0].startswith("#"):
                return tokens
        return []

    def ends_rows(self, index: int) -> bool:
        """Whether a comment inside rows is followed by another block or by nothing."""
        i = index
        while i < len(self.lines):
            tokens = self.split(self.lines[i])
            if tokens and not _is_comment(tokens):
                return tokens[0].startswith("data_") and self.is_header(i, tokens, 0)
            i += 1
        return True

    def is_header(self, index: int, tokens: list[str], width: int) -> bool:
        """Whether a line of rows that starts with ``data_`` opens a block; ``data_1.mrc`` can be a value."""
        if len(tokens) > 1 and not (tokens[1].startswith("#") and len(tokens) != width):
            return False
        following = self.next_content(index + 1)
        if following:
            word = following[0]
            return word.lower() == "loop_" or word.startswith("_") or (width != 1 and word.startswith("data_"))
        return width != 1 and not self.lines[index - 1].strip()

    def is_keyword(self, index: int, tokens: list[str], width: int) -> bool:
        """Whether a line of rows ends them; keywords in the wrong case are refused."""
        first, n = tokens[0], len(tokens)
        lower = first.lower()
        if lower == "loop_" and (n == 1 or n != width):
            if first != "loop_":
                raise self.fail(index, f"{first} must be written loop_, in small letters")
            return True
        if lower.startswith("data_") and self.is_header(index, tokens, width):
            if not first.startswith("data_"):
                raise self.fail(index, f"{first} must begin with data_, in small letters")
            return True
        if first[0] == "_" and not (n == width and width > 2):
            raise self.fail(index, f"label {first} behind the rows of a loop")
        return False
