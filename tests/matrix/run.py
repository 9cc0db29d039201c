# SPDX-License-Identifier: Apache-2.0
"""Fills one row of the matrix with real engines."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.engine.binding import BINDING
from tests.engine.client import Engine, EngineError, cpu_child, disk_child, multi, prompt
from tests.matrix.cells import Cell, Column, Verdict, worst
from tests.matrix.judge import Judge, restorable
from tests.matrix.rows import UNIT, Row

_BEFORE_THE_END = 5
"""Prompts end so few tokens after a boundary: what is recomputed behind it would hide a wrong restore."""
_LONG = prompt(25 * UNIT + _BEFORE_THE_END, seed=1)
_SHORT = prompt(3 * UNIT + _BEFORE_THE_END, seed=2)
_EXTENDED = [*_LONG, *prompt(2 * UNIT, seed=3)]
_SHARED = prompt(9 * UNIT + 11, seed=4)
_SIBLINGS = [[*_SHARED, *prompt(UNIT + _BEFORE_THE_END, seed=5 + number)] for number in range(3)]


class RowRun:
    """One model in engines of its own; ``cells`` fills as ``run`` goes."""

    def __init__(self, row: Row, scratch: Path) -> None:
        self._row = row
        self._root = scratch / "root"
        self._model = row.make(scratch / "model")
        self.cells: dict[Column, Cell] = {}

    def run(self, with_two_ranks: bool = True) -> dict[Column, Cell]:
        """All columns; those of two ranks cost two more starts. Raises EngineError, but for what the row excuses."""
        try:
            self._run(with_two_ranks)
        except EngineError as error:
            excuse = self._row.excuse
            if excuse is None or not re.search(excuse.error, str(error)):
                raise
            self.cells = dict.fromkeys(Column, Cell(Verdict.NOT_RUN, excuse.reason))
        return self.cells

    def _run(self, with_two_ranks: bool) -> None:
        with ExitStack() as engines:
            judge = Judge(self._model, self._row.arguments, engines)
            with self._engine(cpu_child(), disk_child(self._root)) as engine:
                shared = self._first_life(engine, judge)
                self.cells[Column.WRONG_BYTES] = self._wrong_bytes(engine)
            with self._engine(disk_child(self._root)) as engine:
                self.cells[Column.DISK] = worst(
                    [
                        judge.verdict(_LONG, engine.generate(_LONG), self._restorable(len(_LONG))),
                        judge.verdict(_SHORT, engine.generate(_SHORT), self._restorable(len(_SHORT))),
                        judge.verdict(
                            _SIBLINGS[2], engine.generate(_SIBLINGS[2]), self._restorable(len(_SIBLINGS[2])), shared
                        ),
                    ]
                )
        if with_two_ranks:
            self.cells[Column.TWO_RANKS] = self._two_ranks()

    def _engine(self, *children: dict[str, Any], **more: Any) -> Engine:
        return Engine(self._model, **{**self._row.arguments, **more, "kv_transfer_config": multi(*children)})

    def _restorable(self, num_tokens: int) -> int:
        return restorable(num_tokens, self._row.arguments)

    def _first_life(self, engine: Engine, judge: Judge) -> int:
        """The tokens of a shared beginning that were restored."""
        for tokens in (_LONG, _SHORT):
            engine.generate(tokens)
        self.cells[Column.DEVICE] = judge.verdict(_LONG, engine.generate(_LONG), self._restorable(len(_LONG)))
        for column, tokens in ((Column.CPU, _LONG), (Column.SUB_BLOCK, _SHORT)):
            engine.evict()
            self.cells[column] = judge.verdict(tokens, engine.generate(tokens), self._restorable(len(tokens)))
        engine.evict()
        self.cells[Column.EXTENSION] = judge.verdict(
            _EXTENDED, engine.generate(_EXTENDED), self._restorable(len(_LONG))
        )
        for sibling in _SIBLINGS[:2]:
            engine.evict()
            engine.generate(sibling)
        engine.evict()
        third = engine.generate(_SIBLINGS[2])
        self.cells[Column.SHARED_PREFIX] = judge.verdict(_SIBLINGS[2], third, self._restorable(len(_SHARED) + 1))
        if self._row.misses_shared_prefix and third.num_cached_tokens == 0:
            self.cells[Column.SHARED_PREFIX] = Cell(Verdict.NO_HIT, self._row.misses_shared_prefix)
        engine.wait_for_stores()
        return third.num_cached_tokens

    def _wrong_bytes(self, engine: Engine) -> Cell:
        """Zeros the last object of each kind in turn."""
        kinds: list[str] = []
        seen: list[str] = []
        for attempt in range(8):
            tokens = prompt(len(_LONG), seed=100 + attempt)
            engine.call("reset_everything")
            engine.generate(tokens)
            engine.evict()
            restored = engine.generate(tokens)
            kinds = engine.call("fault", name="kinds")
            missing = [kind for kind in kinds if kind not in seen]
            if not missing:
                return Cell(Verdict.EXACT, ", ".join(seen))
            engine.evict()
            engine.call("fault", name="zero", kind=missing[0])
            if engine.generate(tokens).same_as(restored):
                return Cell(Verdict.UNSEEN, f"zeros in the last {missing[0]!r}")
            seen.append(missing[0])
        raise AssertionError(f"more kinds than expected: {kinds}")

    def _two_ranks(self) -> Cell:
        """Compared with its own cold run: two ranks add up in another order than one."""
        root = self._root.with_name("two-ranks")
        more = {"environment": BINDING, "tensor_parallel_size": 2}
        with self._engine(cpu_child(), disk_child(root), **more) as engine:
            cold = engine.generate(_LONG)
            by_device = engine.generate(_LONG)
            engine.evict()
            from_cpu = engine.generate(_LONG)
            engine.wait_for_stores()
        with self._engine(disk_child(root), **more) as engine:
            from_disk = engine.generate(_LONG)
        for restored in (from_cpu, from_disk):
            if restored.num_cached_tokens < self._restorable(len(_LONG)):
                return Cell(Verdict.NO_HIT, f"{restored.num_cached_tokens} of {self._restorable(len(_LONG))} tokens")
        if from_cpu.same_as(cold) and from_disk.same_as(cold):
            return Cell(Verdict.EXACT)
        if from_cpu.same_as(by_device) and from_disk.same_as(by_device):
            return Cell(Verdict.AS_DEVICE, "vLLM's kernels round by where a prefill begins")
        return Cell(Verdict.WRONG, f"{from_cpu}, {from_disk} instead of {cold}")
