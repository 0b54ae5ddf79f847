"""The slot protocol as a small machine whose every run can be tried. Pure: no torch, no thread.

The promise: batch t sees every row as if batches 0..t-1 had been written back in full before t was read, and after a
flush or the end the store holds what the plain loop "read, step, write" leaves there. A row's value is a version number.

Who moves, in any order:
- the *consumer*: next (serve; end a window; make the next one current), write_back, flush, close. It only launches: what
  it launches waits in ``stream`` and is done later, in order.
- the *planner*: plans windows, at most one that is not launched. A row's source is the newest of the windows w-1 ...
  w-depth+1 that holds it, else the store.
- the *fetcher*: launches fetches in order, or fails: the window is replanned as windows of one batch, later plans are
  discarded; a window of one batch that fails breaks the pipeline, which the consumer meets when it gets there.
- the *fetch stream*: takes the slot (what was in it is gone), later fills it: *ready*.
- the *consumer's stream*: carries, serves, writes, passes points (*written* is one).
- the *writer*: one queue; reads a drain's rows from the slot when its point has passed, later puts them in the store.

A fetch, a carry and a drain move all their rows at once. That loses nothing: each row could go wrong only by its own
order, and for each order of one row's moves there is a run where the others move with it.

``Rules`` has a switch for each rule, so that tests can show that none is idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from ._model_state import GONE, Broken, Case, Drain, Row, Rules, State, rows_of


@final
class Protocol:
    """``case`` under ``rules``."""

    def __init__(self, case: Case, rules: Rules | None = None) -> None:
        self.case = case
        self.rules = rules or Rules()
        self._sources: dict[object, dict[Row, int | None]] = {}  # asked for again in every state

    def start(self) -> State:
        """Nothing has happened."""
        rows = 1 + max(row for window in self.case.windows for batch in window for row in batch)
        clean = (0,) * rows
        return State(self.case.windows, clean, clean, ((GONE,) * rows,) * self.case.depth)

    def moves(self, s: State) -> Iterator[tuple[str, State]]:
        """All that may happen next. Raises Broken when one of them breaks the promise."""
        yield from self._consumer(s)
        if s.phase in ("running", "flushing"):
            yield from self._planner(s)
            yield from self._fetcher(s)
        yield from self._fetch_stream(s)
        yield from self._consumer_stream(s)
        yield from self._writer(s)

    # ---- what follows from a state --------------------------------------------------------------------------

    def sources(self, s: State, w: int) -> dict[Row, int | None]:
        """Where each row of window ``w`` comes from: a window, or None for the store."""
        key = (s.windows[: w + 1], w)
        if key not in self._sources:
            oldest = max(0, w - self.case.depth + (1 if self.rules.source_before_depth else 0))
            older = range(w - 1, oldest - 1, -1) if self.rules.newest_source else range(oldest, w)
            found = {row: next((v for v in older if row in rows_of(s.windows[v])), None) for row in rows_of(s.windows[w])}
            self._sources[key] = found
        return self._sources[key]

    def _names(self, s: State, w: int, v: int) -> bool:
        """Whether window ``w`` is planned and has ``v`` as a source."""
        return w < s.planned and v in self.sources(s, w).values()

    def _namers(self, s: State, v: int) -> list[int]:
        if v < 0:
            return []  # before the first window: the slot is fresh
        return [w for w in range(v + 1, min(s.planned, v + self.case.depth + 1)) if self._names(s, w, v)]

    def _landed(self, s: State, v: int) -> bool:
        """Whether nothing of ``v`` is on its way: the drain list was made, and what it held is in the store."""
        return v < s.ended and all(drain.window != v for drain in s.queue)

    def _may_take(self, s: State, w: int) -> bool:
        """The claim rule."""
        v, rules = w - self.case.depth, self.rules
        return v < 0 or (
            (not rules.claim_after_written or v < s.written)
            and (not rules.claim_after_landed or self._landed(s, v))
            and (not rules.claim_after_vacated or all(u < s.copied for u in self._namers(s, v)))
        )

    def _slot(self, s: State, w: int) -> tuple[int, ...]:
        return s.slots[w % self.case.depth]

    def _with_slot(self, s: State, w: int, values: tuple[int, ...]) -> State:
        k = w % self.case.depth
        return s._replace(slots=(*s.slots[:k], values, *s.slots[k + 1 :]))

    # ---- the consumer ---------------------------------------------------------------------------------------

    def _consumer(self, s: State) -> Iterator[tuple[str, State]]:
        if s.phase == "running":
            if not s.may_write or self.case.skips:
                yield from self._next(s)
            if s.may_write:
                yield "write_back", self._write_back(s)
            if s.flushes < self.case.flushes:
                yield "flush", self._flush(s)
            if self.case.closes:
                yield "close", self._close(s)
        elif not s.queue and (s.phase == "flushing" or (s.phase == "closing" and not s.stream)):
            if s.store != s.truth:
                raise Broken(f"the store holds {s.store} when {s.phase} is done; it should hold {s.truth}")
            live = s.ended == s.current and s.served > 0
            yield "landed", s._replace(phase="running", may_write=live) if s.phase == "flushing" else s._replace(phase="closed")

    def _next(self, s: State) -> Iterator[tuple[str, State]]:
        if s.current >= 0 and s.served < len(s.windows[s.current]):
            yield f"next: serve {s.served} of window {s.current}", self._serve(s)
        elif s.current == s.ended:
            yield f"next: end window {s.current}", self._end_window(s)
        elif s.ended == len(s.windows) or s.ended == s.broken:
            yield "next: no more", self._close(s)
        elif s.ended < s.launched:
            yield f"next: window {s.ended} becomes current", self._serve(self._become_current(s))

    def _serve(self, s: State) -> State:
        w, window = s.current, s.windows[s.current]
        rows = window[s.served]
        expected = tuple(s.truth[row] for row in rows)
        s = s._replace(served=s.served + 1, stream=(*s.stream, ("serve", w, rows, expected)), may_write=self.case.writable)
        last = s.served == len(window)
        return self._end_window(s) if last and not self.case.writable else s

    def _write_back(self, s: State) -> State:
        rows, version = s.windows[s.current][s.served - 1], s.version + 1
        truth = tuple(version if row in rows else old for row, old in enumerate(s.truth))
        stream = (*s.stream, ("write", s.current, rows, version))
        return s._replace(truth=truth, version=version, stream=stream, marks=s.marks | set(rows), may_write=False)

    def _end_window(self, s: State) -> State:
        """Record *written*; make the drain list; keep what the next window takes over with its mark."""
        w = s.current
        later = range(w + 1, min(s.planned, w + 2 if self.rules.mark_travels_one else s.planned))
        kept = {row for row in s.marks if any(self.sources(s, u).get(row) == w for u in later)}
        drained = s.marks - kept if self.rules.drop_kept_from_drain else s.marks
        s = s._replace(ended=w + 1, stream=(*s.stream, ("written",)), marks=frozenset(), may_write=False)
        s = s._replace(kept=s.kept | {(w, row) for row in kept})
        return self._drain(s, w, drained)

    def _become_current(self, s: State) -> State:
        w = s.ended
        named = {(v, row) for row, v in self.sources(s, w).items() if v is not None}
        travels = s.kept & named
        marks = frozenset(row for _, row in travels) if self.rules.carry_takes_mark else frozenset()
        stream = (*s.stream, ("carry", w, tuple(sorted(named)))) if self._carries_late() else s.stream
        return s._replace(current=w, served=0, marks=marks, kept=s.kept - travels, stream=stream)

    def _carries_late(self) -> bool:
        return self.case.writable and self.rules.carry_after_written

    def _drain(self, s: State, window: int, rows: frozenset[Row] | set[Row]) -> State:
        """Append a drain that starts after all points on the stream so far."""
        if not rows:
            return s
        point = s.points + sum(op[0] in ("written", "point") for op in s.stream)
        return s._replace(queue=(*s.queue, Drain(window, tuple(sorted(rows)), point)))

    def _drain_kept(self, s: State) -> State:
        for window in sorted({window for window, _ in s.kept}):
            s = self._drain(s, window, {row for v, row in s.kept if v == window})
        return s._replace(kept=frozenset())

    def _flush(self, s: State) -> State:
        s = s._replace(phase="flushing", flushes=s.flushes + 1)
        if self.rules.drain_kept_at_flush:
            s = self._drain_kept(s)
        s = s._replace(stream=(*s.stream, ("point",)))
        if s.marks and self.rules.flush_drains_current:
            s = self._drain(s, s.current, s.marks)
        if self.rules.flush_clears_marks:
            s = s._replace(marks=frozenset())
        if not self.rules.flush_leaves_window_open and s.current == s.ended:
            s = s._replace(ended=s.current + 1, written=s.current + 1)
        return s

    def _close(self, s: State) -> State:
        s = self._drain_kept(s) if self.rules.drain_kept_at_close else s._replace(kept=frozenset())
        if s.current == s.ended:
            s = s._replace(ended=s.current + 1, stream=(*s.stream, ("written",)))
            s = self._drain(s, s.current, s.marks)
        return s._replace(phase="closing", marks=frozenset(), may_write=False)

    # ---- the others -----------------------------------------------------------------------------------------

    def _planner(self, s: State) -> Iterator[tuple[str, State]]:
        if s.planned < len(s.windows) and s.planned <= s.launched and s.broken is None:
            yield f"plan {s.planned}", s._replace(planned=s.planned + 1)

    def _fetcher(self, s: State) -> Iterator[tuple[str, State]]:
        w = s.launched
        if w == s.planned:
            return
        if self._recorded(s, w - self.case.depth):
            yield f"launch {w}", s._replace(launched=w + 1)
        if s.failures < self.case.failures:
            yield f"fail {w}", self._fail(s, w)

    def _recorded(self, s: State, v: int) -> bool:
        """Whether the events that the fetch into ``v``'s slot waits for exist: one can't wait for what is not recorded."""
        asked = s.current + 1 if self._carries_late() else s.launched  # windows whose carries were launched
        written = v < s.ended or not self.rules.claim_after_written
        return written and (not self.rules.claim_after_vacated or all(u < asked for u in self._namers(s, v)))

    def _fail(self, s: State, w: int) -> State:
        s = s._replace(failures=s.failures + 1, planned=w)  # w's plan and all later ones are gone
        s = self._drain_kept(s) if self.rules.drain_kept_at_failure else s._replace(kept=frozenset())
        if len(s.windows[w]) == 1:
            return s._replace(broken=w)
        return s._replace(windows=(*s.windows[:w], *((batch,) for batch in s.windows[w]), *s.windows[w + 1 :]))

    def _fetch_stream(self, s: State) -> Iterator[tuple[str, State]]:
        w = s.filled
        if w < s.taken:
            yield f"fill {w}", self._fill(s, w)
        elif w < s.launched and self._may_take(s, w):
            yield f"take the slot for {w}", self._with_slot(s, w, (GONE,) * len(s.store))._replace(taken=w + 1)

    def _fill(self, s: State, w: int) -> State:
        values = list(self._slot(s, w))
        for row, v in self.sources(s, w).items():
            if v is None:
                values[row] = s.store[row]
            elif not self._carries_late():
                values[row] = self._slot(s, v)[row]
        s = self._with_slot(s, w, tuple(values))._replace(filled=w + 1)
        return s if self._carries_late() else s._replace(copied=w + 1)

    def _consumer_stream(self, s: State) -> Iterator[tuple[str, State]]:
        if not s.stream:
            return
        (kind, *args), s = s.stream[0], s._replace(stream=s.stream[1:])
        if kind in ("written", "point"):
            yield kind, s._replace(points=s.points + 1, written=s.written + (kind == "written"))
            return
        w, what = args[0], args[1]
        assert isinstance(w, int)
        assert isinstance(what, tuple)
        if w >= s.filled and self.rules.serve_after_ready:
            return
        values = list(self._slot(s, w))
        if kind == "serve":
            seen = tuple(values[row] for row in what)
            if seen != args[2]:
                raise Broken(f"window {w} serves rows {what} as {seen}; they should be {args[2]}")
        elif kind == "write":
            for row in what:
                values[row] = int(str(args[2]))
        else:
            for v, row in what:
                values[row] = self._slot(s, v)[row]
            s = s._replace(copied=w + 1)
        yield f"{kind} runs for window {w}", self._with_slot(s, w, tuple(values))

    def _writer(self, s: State) -> Iterator[tuple[str, State]]:
        for i, drain in enumerate(s.queue[: 1 if self.rules.drains_in_order else None]):
            before, after = s.queue[:i], s.queue[i + 1 :]
            if drain.values is not None:
                store = tuple(dict(zip(drain.rows, drain.values, strict=True)).get(row, old) for row, old in enumerate(s.store))
                yield f"land {drain.window}", s._replace(store=store, queue=(*before, *after))
            elif s.points >= drain.point or not self.rules.drain_after_point:
                values = tuple(self._slot(s, drain.window)[row] for row in drain.rows)
                yield f"read the drain of {drain.window}", s._replace(queue=(*before, drain._replace(values=values), *after))
