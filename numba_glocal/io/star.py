"""A small strict reader and writer of STAR files. A row is a line, as in RELION.

Tokens are kept byte for byte, quotes included, with every column, block and their order. What is not clearly a STAR file of
the field (wrong number of columns, a label twice, two blocks of one name ...) is refused with file and line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ListError
from .paths import whole_file

# a quote closes only where a blank follows, so that 'a'b' is one token
_TOKEN = re.compile(r"""(?:"[^\n]*?"(?=[ \t\r\f\v]|$)|'[^\n]*?'(?=[ \t\r\f\v]|$)|[^ \t\r\f\v]+)""")
_BLANKS = " \t\r\n\f\v"
_BLANK_BYTES = np.zeros(256, np.bool_)
_BLANK_BYTES[list(_BLANKS.encode())] = True
# a row that begins with one of these may be a comment, a label, or the start of something else
_UNSAFE_FIRST = np.zeros(256, np.bool_)
_UNSAFE_FIRST[list(b"_#\"'")] = True
_WORD_FIRST = np.zeros(256, np.bool_)
_WORD_FIRST[list(b"dDlL")] = True
_DATA, _LOOP = (np.frombuffer(word, np.uint8) | 0x20 for word in (b"data_", b"loop_"))
_CHUNK_BYTES = 1 << 22
_MANY_ROWS = 100_000
"""From here on it pays to load the compiled reader."""
_WRITTEN_ROWS = 20_000


class _Rows:
    """Where the tokens of a loop's rows stand in the bytes of their file.

    A million rows of 25 tokens as Python texts would take several GiB; as places they take a few bytes each, and a column becomes
    texts when somebody asks for it.
    """

    __slots__ = ("lengths", "starts", "text")

    def __init__(self, text: bytes, starts: NDArray[Any], lengths: NDArray[Any]) -> None:
        self.text = text
        self.starts = starts  # (columns, rows)
        self.lengths = lengths

    def tokens(self, column: int, rows: NDArray[np.intp] | slice) -> list[bytes]:
        """Tokens of some rows of a column, as bytes."""
        text = self.text
        starts = self.starts[column][rows].astype(np.int64)
        ends = starts + self.lengths[column][rows]
        return [text[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def numbers(self, columns: Sequence[int], rows: NDArray[np.intp] | slice) -> NDArray[np.float64]:
        """Tokens of some rows as numbers, (rows, columns); ``ValueError`` where one is none."""
        starts = np.stack([self.starts[column][rows] for column in columns]).astype(np.int64)
        lengths = np.stack([self.lengths[column][rows] for column in columns]).astype(np.int64)
        if starts.shape[1] < _MANY_ROWS:
            return np.stack([np.fromiter(map(float, self.tokens(column, rows)), np.float64, starts.shape[1]) for column in columns], axis=1)
        from .star_compiled import plain_numbers

        values, plain = plain_numbers(np.frombuffer(self.text, np.uint8), starts, lengths)
        for row, k in np.argwhere(~plain).tolist():
            at = int(starts[k, row])
            values[row, k] = float(self.text[at : at + int(lengths[k, row])])
        return np.asarray(values)


def _decoded(tokens: list[bytes]) -> list[str]:
    """Tokens as texts; no token holds a line feed, so that all can be decoded together."""
    return b"\n".join(tokens).decode("utf-8", "surrogateescape").split("\n") if tokens else []


def _encoded(tokens: Sequence[str]) -> list[bytes]:
    """The other way."""
    return "\n".join(tokens).encode("utf-8", "surrogateescape").split(b"\n") if tokens else []


class TokenColumn(Sequence[str]):
    """The tokens of one column, left in their file until they are asked for; a change makes it a list of its own."""

    __slots__ = ("_column", "_index", "_own", "_rows")

    def __init__(self, rows: _Rows, column: int, index: NDArray[np.intp] | None = None) -> None:
        self._rows = rows
        self._column = column
        self._index = index
        self._own: list[str] | None = None

    def __len__(self) -> int:
        if self._own is not None:
            return len(self._own)
        return self._rows.starts.shape[1] if self._index is None else len(self._index)

    def numbers(self) -> NDArray[np.float64]:
        """All tokens as numbers; ``ValueError`` where one is none."""
        if self._own is not None:
            return np.fromiter(map(float, self._own), np.float64, len(self._own))
        return self._rows.numbers([self._column], slice(None) if self._index is None else self._index)[:, 0]

    def numbers_with(self, others: Sequence[TokenColumn]) -> NDArray[np.float64] | None:
        """All tokens of this column and of others behind it as numbers, (rows, 1 + others); None where they are not of one file's rows."""
        together = all(other._rows is self._rows and other._index is self._index and other._own is None for other in others)
        if not together or self._own is not None:
            return None
        return self._rows.numbers([self._column, *(other._column for other in others)], slice(None) if self._index is None else self._index)

    def follows(self, other: TokenColumn) -> bool:
        """Whether this column stands right behind `other` in one file, for the same rows, and neither was changed."""
        together = self._rows is other._rows and self._index is other._index and self._column == other._column + 1
        return together and self._own is None and other._own is None

    def raw_through(self, last: TokenColumn, start: int, stop: int) -> list[bytes]:
        """Rows from `start` to `stop`: what stands in the file from this column to the end of `last`, blanks between them too."""
        if self is last:
            return self.raw(start, stop)
        rows = slice(start, stop) if self._index is None else self._index[start:stop]
        text, places = self._rows.text, self._rows
        begins = places.starts[self._column][rows].tolist()
        ends = (places.starts[last._column][rows].astype(np.int64) + places.lengths[last._column][rows]).tolist()
        return [text[a:b] for a, b in zip(begins, ends, strict=True)]

    def raw(self, start: int, stop: int) -> list[bytes]:
        """Tokens from row `start` to `stop`, as they are in the file."""
        if self._own is not None:
            return _encoded(self._own[start:stop])
        return self._rows.tokens(self._column, slice(start, stop) if self._index is None else self._index[start:stop])

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if self._own is not None:
            return self._own[row]
        if isinstance(row, slice):
            return list(self)[row]
        row = range(len(self))[row]
        return self.raw(row, row + 1)[0].decode("utf-8", "surrogateescape")

    def __setitem__(self, row: int, token: str) -> None:
        if self._own is None:
            self._own = list(self)
        self._own[row] = token

    def __iter__(self) -> Iterator[str]:
        if self._own is not None:
            return iter(self._own)
        return iter(_decoded(self.raw(0, len(self))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def take(self, rows: NDArray[np.intp]) -> Sequence[str]:
        """The tokens of some rows, in that order."""
        if self._own is not None:
            return [self._own[row] for row in rows.tolist()]
        return TokenColumn(self._rows, self._column, rows if self._index is None else self._index[rows])


# texts on lines of their own of which one is empty, or begins or holds what a token cannot begin with or hold
_NEEDS_A_LOOK = re.compile(r"""[ \t\r\f\v"']|(?:^|\n)(?:\n|$|#|_|[lL][oO][oO][pP]_)""")


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
    columns : list of sequences of str
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
    columns: list[Any] = field(default_factory=list)
    has_loop: bool = False
    comments: list[str] = field(default_factory=list)
    path: str = ""
    line: int = 0
    row_lines: Sequence[int] | NDArray[np.integer[Any]] = ()

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

    def tokens(self, label: str) -> Any:
        """The tokens of a column as they stand in the file: a sequence of texts whose items can be set."""
        if label not in self.labels:
            raise ListError(f"{self.where()}: no column _{label}")
        return self.columns[self.labels.index(label)]

    def texts(self, label: str) -> list[str]:
        """The values of a column, quotes removed."""
        tokens = list(self.tokens(label))
        joined = "\n".join(tokens)
        return tokens if '"' not in joined and "'" not in joined else [unquote(t) for t in tokens]

    def value(self, key: str) -> str:
        """The value of a key/value pair, quotes removed."""
        if key not in self.pairs:
            raise ListError(f"{self.where()}: no key _{key}")
        return unquote(self.pairs[key])

    def numbers(self, label: str) -> NDArray[np.float64]:
        """A column as numbers, ``nan`` and ``inf`` too; ``ValueError`` where a token is none."""
        tokens = self.tokens(label)
        return tokens.numbers() if isinstance(tokens, TokenColumn) else np.fromiter(map(float, tokens), np.float64, len(tokens))

    def floats(self, label: str) -> NDArray[np.float64]:
        """A column as finite numbers; a token that is not one is refused with its line."""
        try:
            values = self.numbers(label)
        except ValueError:
            texts = self.texts(label)  # a number in quotes is one, too
            row = next((i for i, t in enumerate(texts) if not _is_float(t)), -1)
            values = np.array([float(t) for t in texts]) if row < 0 else np.zeros(0)
        else:
            row = -1
        if row < 0:
            if np.isfinite(values).all():
                return values
            row = int(np.flatnonzero(~np.isfinite(values))[0])
        texts = self.texts(label)
        raise ListError(f"{self.where(row)}: _{label} is '{texts[row]}', expected a finite number")

    def floats_of(self, labels: Sequence[str]) -> NDArray[np.float64]:
        """Several columns as finite numbers, (rows, columns); as `floats`, in less time than one by one."""
        tokens = [self.tokens(label) for label in labels]
        if all(isinstance(column, TokenColumn) for column in tokens):
            try:
                values = tokens[0].numbers_with(tokens[1:])
            except ValueError:
                values = None
            if values is not None and np.isfinite(values).all():
                return np.asarray(values)
        return np.stack([self.floats(label) for label in labels], axis=1)

    def set_column(self, label: str, texts: Iterable[str], plain: bool = False) -> None:
        """Replace a column, or add it at the end; `plain` texts are known to need no quotes (numbers)."""
        label = label.removeprefix("_")
        tokens = list(texts) if plain else quoted(texts)
        if self.columns and len(tokens) != self.n_rows:
            raise ListError(f"{self.where()}: column _{label} has {len(tokens)} values, expected {self.n_rows}")
        self.has_loop = True
        if label in self.labels:
            self.columns[self.labels.index(label)] = tokens
        else:
            self.labels.append(label)
            self.columns.append(tokens)

    def drop_column(self, label: str) -> None:
        """Leave a column out, where it is there."""
        if label in self.labels:
            place = self.labels.index(label)
            del self.labels[place], self.columns[place]

    def rename_column(self, label: str, name: str) -> None:
        """Give a column another label."""
        self.labels[self.labels.index(label)] = name

    def insert_columns(self, before: str | None, labels: Sequence[str], texts: Sequence[Iterable[str]]) -> None:
        """Columns in front of another one, or at the end; columns of the same labels are replaced."""
        for label in labels:
            if label != before:
                self.drop_column(label)
        place = self.labels.index(before) if before in self.labels else len(self.labels)
        for offset, (label, column) in enumerate(zip(labels, texts, strict=True)):
            if label == before:
                self.columns[self.labels.index(label)] = quoted(column)
            else:
                self.labels.insert(place + offset, label)
                self.columns.insert(place + offset, quoted(column))

    def take(self, index: NDArray[np.integer[Any]] | Sequence[int]) -> StarBlock:
        """The block with the rows at `index`, in that order."""
        rows = np.asarray(index, dtype=np.intp)
        lines = np.asarray(self.row_lines)
        picked: list[Any] = []
        for column in self.columns:
            picked.append(column.take(rows) if isinstance(column, TokenColumn) else [column[i] for i in rows.tolist()])
        return StarBlock(
            self.name,
            dict(self.pairs),
            list(self.labels),
            picked,
            self.has_loop,
            list(self.comments),
            self.path,
            self.line,
            lines[rows] if len(lines) else (),
        )

    def where(self, row: int | None = None) -> str:
        """File and line of the block, or of one of its rows, for messages."""
        line = self.line if row is None else (int(self.row_lines[row]) if len(self.row_lines) else 0)
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
        # the rarer one first, and last the one before a #, which some readers take for its end
        for mark in sorted("\"'", key=lambda mark: (f"{mark}#" in text, text.count(mark))):
            token = f"{mark}{text}{mark}"
            if _TOKEN.fullmatch(token) and _TOKEN.findall(token) == [token]:
                return token
    raise ListError(f"cannot write {text!r} as one STAR value")


def quoted(texts: Iterable[str]) -> list[str]:
    """`quote` of many texts."""
    texts = list(texts)
    # a look at all of them at once: most columns need no quotes
    joined = "\n".join(texts)
    if joined.count("\n") == len(texts) - 1 and not _NEEDS_A_LOOK.search(joined):
        return texts
    return [quote(t) for t in texts]


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
    if not raw or raw.isspace():
        raise ListError(f"{path}: the file is empty")
    if b"\0" in raw:
        kind = "a volume; expected a particle list" if raw[208:212] == b"MAP " else "binary"
        raise ListError(f"{path}: not a STAR file; it is {kind}")
    return _Parser(raw, str(path)).document()


def parse_star(text: str, path: str = "") -> StarDocument:
    """Parse the text of a STAR file; `path` is for messages. See `read_star`."""
    return _Parser(text.encode("utf-8", "surrogateescape"), path).document()


def write_star(path: str | Path, document: StarDocument) -> None:
    """Write a STAR file, whole or not at all; tokens as they are."""
    with whole_file(path) as handle:
        for block in document.blocks:
            handle.write(_block_head(block).encode("utf-8", "surrogateescape"))
            if block.has_loop:
                for rows in _block_rows(block):
                    handle.write(rows)
                handle.write(b"\n")


def _block_head(block: StarBlock) -> str:
    lines = ["", *block.comments, f"data_{block.name}", ""]
    if block.pairs:
        width = max(map(len, block.pairs))
        lines += [f"_{key:<{width}}  {token}" for key, token in block.pairs.items()]
        lines.append("")
    if block.has_loop:
        lines.append("loop_")
        lines += [f"_{label} #{i}" for i, label in enumerate(block.labels, 1)]
    return "\n".join(lines) + "\n"


def _block_rows(block: StarBlock) -> Iterator[bytes]:
    """Rows as bytes, some thousands at a time. Columns that stood side by side in a file are copied together, with their blanks."""
    runs: list[list[Any]] = []
    for column in block.columns:
        if runs and isinstance(column, TokenColumn) and isinstance(runs[-1][-1], TokenColumn) and column.follows(runs[-1][-1]):
            runs[-1].append(column)
        else:
            runs.append([column])
    for start in range(0, block.n_rows, _WRITTEN_ROWS):
        stop = min(start + _WRITTEN_ROWS, block.n_rows)
        parts = [
            run[0].raw_through(run[-1], start, stop) if isinstance(run[0], TokenColumn) else _encoded(run[0][start : start + _WRITTEN_ROWS])
            for run in runs
        ]
        # the strict zip refuses columns of different lengths before anything is replaced
        yield b"\n".join(map(b"\t".join, zip(*parts, strict=True))) + b"\n"


def _small(lengths: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(lengths, np.uint16 if lengths.max(initial=0) < 2**16 else np.int64)


def _found(text: NDArray[np.uint8], byte: int) -> NDArray[np.int64]:
    """Places of a byte, found piece by piece to save memory."""
    pieces = [np.flatnonzero(text[i : i + _CHUNK_BYTES] == byte) + i for i in range(0, len(text), _CHUNK_BYTES)]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _has_blank(text: str) -> bool:
    return any(c in text for c in _BLANKS)


def _is_comment(tokens: Sequence[str]) -> bool:
    """A comment has a blank (or a second #) behind its #; ``#1.mrc`` is a value."""
    return tokens[0] == "#" or tokens[0].startswith("##")


class _Parser:
    """One pass over the lines. Kept apart from the document so that no state outlives a file."""

    def __init__(self, raw: bytes, path: str) -> None:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
        if b"\n" not in raw:
            raw = raw.replace(b"\r", b"\n")
        self.path = path
        self.raw = raw
        self.bytes = np.frombuffer(raw, np.uint8)
        self.ends = np.append(_found(self.bytes, 10), len(raw))  # of the lines, where their line feeds stand
        self.has_quotes = b'"' in raw or b"'" in raw
        self.blocks: list[StarBlock] = []
        self.comments: list[str] = []

    @property
    def n_lines(self) -> int:
        return len(self.ends)

    def begin(self, index: int) -> int:
        """Place of a line's first byte."""
        return int(self.ends[index - 1]) + 1 if index else 0

    def line(self, index: int) -> str:
        # surrogateescape keeps bytes that are not UTF-8 (old file names) as they are
        return self.raw[self.begin(index) : int(self.ends[index])].decode("utf-8", "surrogateescape")

    def split(self, index: int) -> list[str]:
        """A line split at ASCII blanks only: a name may hold a no-break space, at which `str.split` would cut."""
        parts = self.raw[self.begin(index) : int(self.ends[index])].split()
        return [part.decode("utf-8", "surrogateescape") for part in parts]

    def fail(self, index: int, message: str) -> ListError:
        return ListError(f"{self.path}:{index + 1}: {message}")

    def tokens(self, index: int) -> list[str]:
        """Tokens of a line; none for a blank line."""
        if not self.has_quotes:
            return self.split(index)
        line = self.line(index)
        if '"' not in line and "'" not in line:
            return self.split(index)
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
        i, n = 0, self.n_lines
        while i < n:
            tokens = self.tokens(i)
            if not tokens:
                i += 1
            elif tokens[0].startswith("#"):
                self.comments.append(self.line(i).strip())
                i += 1
            elif tokens[0].startswith("data_") and (len(tokens) == 1 or tokens[1].startswith("#")):
                i = self.block(i, tokens[0][5:])
            else:
                shown = self.line(i).strip()[:60]
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
        while i < self.n_lines:
            tokens = self.tokens(i)
            if not tokens:
                i += 1
            elif tokens[0].startswith("#"):
                self.comments.append(self.line(i).strip())
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
                raise self.fail(i, f"'{self.line(i).strip()[:60]}' stands outside of a loop")
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
        while i < self.n_lines:
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
        rows, row_lines, i = self.rows(i, len(labels))
        block.has_loop = True
        block.labels = labels
        block.columns = [TokenColumn(rows, k) for k in range(len(labels))]
        block.row_lines = row_lines
        return i

    def rows(self, i: int, width: int) -> tuple[_Rows, NDArray[np.int64], int]:
        """Places of the rows that begin at line `i`, their lines, and the line after them."""
        starts: list[NDArray[Any]] = []
        lengths: list[NDArray[Any]] = []
        lines: list[NDArray[Any]] = []
        place = np.uint32 if len(self.raw) < 2**32 else np.int64
        index, over = i, False
        while index < self.n_lines and not over:
            # whole lines, some MB at a time; the usual ones are dealt with together
            last = max(int(np.searchsorted(self.ends, self.begin(index) + _CHUNK_BYTES)), index + 1)
            last = min(last, self.n_lines)
            first_byte, counts, token_starts, token_ends, usual = self.scan(index, last, width)
            before = np.concatenate([[0], np.cumsum(counts)])
            kept = 0  # lines of the chunk up to here are in the lists
            for odd in [*np.flatnonzero(~usual).tolist(), last - index]:
                if odd > kept:
                    part = slice(int(before[kept]), int(before[odd]))
                    starts.append((token_starts[part] + np.int64(first_byte)).reshape(-1, width).T.astype(place))
                    lengths.append(_small((token_ends[part] - token_starts[part]).reshape(-1, width).T))
                    lines.append(np.arange(index + kept + 1, index + odd + 1))
                kept = odd + 1
                if odd == last - index:
                    break
                row = self.odd_row(index + odd, width)
                if row is None:
                    index, over = index + odd, True
                    break
                if row:
                    places = np.array(row, np.int64)
                    starts.append(places[:, :1].astype(place))
                    lengths.append(_small(places[:, 1:] - places[:, :1]))
                    lines.append(np.array([index + odd + 1]))
            if not over:
                index = last
        none = np.zeros((width, 0), place)
        return (
            _Rows(self.raw, np.concatenate([none, *starts], axis=1), np.concatenate([none.astype(np.uint16), *lengths], axis=1)),
            np.concatenate([np.zeros(0, np.int64), *lines]),
            index if over else self.n_lines,
        )

    def scan(self, index: int, last: int, width: int) -> tuple[int, NDArray[Any], NDArray[Any], NDArray[Any], NDArray[np.bool_]]:
        """Tokens of the lines from `index` to `last`: first byte, tokens of each line, their places from there, and which lines are usual rows."""
        first_byte, end = self.begin(index), int(self.ends[last - 1])
        text = self.bytes[first_byte:end]
        blank = np.ones(len(text) + 2, np.bool_)
        blank[1:-1] = _BLANK_BYTES[text]
        edges = np.flatnonzero(blank[1:] != blank[:-1]).astype(np.int32)
        token_starts, token_ends = edges[::2], edges[1::2]
        line_ends = self.ends[index:last] - first_byte
        before = np.searchsorted(token_starts, line_ends)
        counts = np.diff(before, prepend=0)
        usual = counts == width
        rows = np.flatnonzero(usual)
        firsts = token_starts[(before - counts)[rows]]
        usual[rows[_UNSAFE_FIRST[text[firsts]]]] = False
        # data_ and loop_ in any case; other names with these letters are as usual as any
        worded = np.flatnonzero(_WORD_FIRST[text[firsts]] & (firsts + 5 <= len(text)))
        heads = text[firsts[worded][:, None] + np.arange(5)] | 0x20
        words = (heads == _DATA).all(axis=1) | (heads == _LOOP).all(axis=1)
        usual[rows[worded[words]]] = False
        if self.has_quotes:
            for mark in b"\"'":
                usual[np.searchsorted(line_ends, _found(text, mark))] = False
        return first_byte, counts, token_starts, token_ends, usual

    def odd_row(self, index: int, width: int) -> list[tuple[int, int]] | None:
        """A line among rows that is not a usual row: the places of its tokens, none for a line to skip, None where the rows end."""
        tokens = self.split(index)
        if not tokens:
            return []
        if self.has_quotes:
            tokens = self.tokens(index)
        if _is_comment(tokens):
            # the comment lines before the next block belong to it
            return None if self.ends_rows(index) else []
        if self.is_keyword(index, tokens, width):
            return None
        if len(tokens) > width and tokens[width].startswith("#"):
            tokens = tokens[:width]
        if len(tokens) != width:
            hint = "; a comment needs a blank behind its #" if tokens[0].startswith("#") else ""
            raise self.fail(index, f"expected {width} columns, found {len(tokens)}{hint}")
        places, at = [], self.begin(index)
        for token in tokens:
            encoded = token.encode("utf-8", "surrogateescape")
            at = self.raw.index(encoded, at)
            places.append((at, at + len(encoded)))
            at += len(encoded)
        return places

    def is_comment_among_labels(self, index: int, tokens: list[str]) -> bool:
        """``#1.mrc`` behind the last label is a row; before a label it can only be a comment."""
        return _is_comment(tokens) or (tokens[0].startswith("#") and "".join(self.next_content(index + 1)).startswith("_"))

    def next_content(self, index: int) -> list[str]:
        """Tokens of the first line from `index` on that is neither blank nor a comment."""
        for i in range(index, self.n_lines):
            tokens = self.split(i)
            if tokens and not tokens[0].startswith("#"):
                return tokens
        return []

    def ends_rows(self, index: int) -> bool:
        """Whether a comment inside rows is followed by another block or by nothing."""
        i = index
        while i < self.n_lines:
            tokens = self.split(i)
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
        return width != 1 and not self.line(index - 1).strip()

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
