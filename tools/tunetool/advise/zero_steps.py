"""One training step under ZeRO, event by event: what is computed, which collective is asked for, which is waited for.

Pure. It repeats what DeepSpeed 0.19.8 does once it knows the order of modules, from the third step on; in the first two
of stage 3 it learns that order, and gathers each module on its own (zero/partitioned_param_coordinator.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tunetool.advise.communication import (
    SCALAR_BYTES,
    Backend,
    Call,
    Module,
    Parameter,
    Traffic,
    Zero,
    buckets,
    padded,
    parameters,
    trained,
)

_NEVER = -1


@dataclass(frozen=True)
class Work:
    """Computation: elements that are multiplied, once forward, and backward once or, where trained, twice."""

    elements: int


@dataclass(frozen=True)
class Ask:
    """A collective is started. ``number`` is for who waits for it."""

    call: Call
    number: int


@dataclass(frozen=True)
class Wait:
    """Nothing goes on until that collective is done."""

    number: int


Event = Work | Ask | Wait


@dataclass(frozen=True)
class Use:
    """A module runs."""

    module: Module
    backward: bool


def uses(modules: Sequence[Module], recompute: bool) -> list[Use]:
    """Forward in order, then backward; with activation checkpointing a block forward again before its backward."""
    found = [Use(module, backward=False) for module in modules]
    again: set[int] = set()
    for module in reversed(modules):
        if recompute and module.block is not None and module.block not in again:
            again.add(module.block)
            block = [each for each in modules if each.block == module.block]
            if any(each.backward for each in block):
                found += [Use(each, backward=False) for each in block]
        if module.backward:
            found.append(Use(module, backward=True))
    return found


def traffic(modules: Sequence[Module], zero: Zero, world: int, element_bytes: int, backend: Backend) -> Traffic:
    """The collectives of one step. ``element_bytes``: 2 in bf16 and fp16, 4 in fp32."""
    calls = [event.call for event in events(modules, zero, world, element_bytes) if isinstance(event, Ask)]
    return Traffic(tuple(calls), world, backend)


def events(modules: Sequence[Module], zero: Zero, world: int, element_bytes: int) -> Iterator[Event]:
    """One step, in its steady state. One rank alone asks for nothing."""
    if zero.stage == 3:
        found = _Stage3(modules, zero, world, element_bytes).events()
    else:
        found = _replicated(modules, zero, element_bytes)
    for event in found:
        if world > 1 or isinstance(event, Work):
            yield event


def _replicated(modules: Sequence[Module], zero: Zero, element_bytes: int) -> Iterator[Event]:
    """Stages 0 to 2: parameters are everywhere."""
    number = 0
    waiting: list[int] = []
    left = deque(buckets([each.numel for each in trained(modules)], zero.reduce_bucket))
    ready, sent = 0, 0
    seen: set[str] = set()
    for use in uses(modules, zero.recompute):
        yield _work(use)
        if not use.backward:
            continue
        ready += sum(each.numel for each in use.module.parameters if each.trained and each.name not in seen)
        seen |= {each.name for each in use.module.parameters}
        # A bucket leaves when the next gradient would overfill it, and the last one when all are there.
        while len(left) > 1 and ready > sent + left[0]:
            size = left.popleft()
            sent += size
            yield Ask(Call("all_reduce", size * element_bytes), number)
            if zero.overlap:
                waiting.append(number)
            else:
                yield Wait(number)
            number += 1
    for size in left:
        yield Ask(Call("all_reduce", size * element_bytes), number)
        waiting.append(number)
        number += 1
    yield from (Wait(each) for each in waiting)
    if zero.clip and zero.stage > 0:
        yield from _alone(Call("all_reduce", SCALAR_BYTES), number)
        number += 1
    updated = sum(each.numel for each in trained(modules))
    if zero.stage > 0 and updated:
        yield from _alone(Call("all_gather", updated * element_bytes), number)


@dataclass
class _Stage3:
    """The coordinator's books: which parameters are here, which are on their way."""

    modules: Sequence[Module]
    zero: Zero
    world: int
    element_bytes: int
    here: set[str] = field(default_factory=set)
    coming: dict[str, int] = field(default_factory=dict)
    """Parameter to the number of its gather."""
    number: int = 0
    elements: int = 0
    """Of what is here or coming."""
    looked: dict[str, int] = field(default_factory=dict)
    """For which use a parameter was fetched last (__most_recent_step_id_param_fetched_for)."""

    def __post_init__(self) -> None:
        self.order = uses(self.modules, self.zero.recompute)
        self.queue = deque((each, place) for place, use in enumerate(self.order) for each in use.module.parameters)
        stay = [each for each in parameters(self.modules) if each.numel <= self.zero.persistence]
        self.stay = {each.name: each for each in stay}
        self.here |= self.stay.keys()  # gathered after the step before

    def events(self) -> Iterator[Event]:
        """The whole step."""
        held: list[Parameter] = []
        seen: set[str] = set()
        pending: list[int] = []
        yield from self._prefetch()  # the model itself is the first module of the trace, and holds nothing
        for place, use in enumerate(self.order):
            yield from self._fetch(use.module, place)
            yield from self._prefetch()
            yield _work(use)
            self._release(use.module, place + 1)
            if use.backward:
                for each in (each for each in use.module.parameters if each.trained and each.name not in seen):
                    seen.add(each.name)
                    if held and sum(one.numel for one in held) + each.numel > self.zero.reduce_bucket:
                        yield from self._reduce(held, pending)
                        held = []
                    held.append(each)
        if held:
            yield from self._reduce(held, pending)
        yield from (Wait(number) for number in pending)
        if self.zero.clip:
            yield from _alone(Call("all_reduce", 2 * SCALAR_BYTES), self._next())
        asked = [self._ask([each]) for each in self.stay.values()]
        yield from asked
        yield from (Wait(ask.number) for ask in asked)

    def _fetch(self, module: Module, place: int) -> Iterator[Event]:
        """What the module needs now; what the queue of the trace held for it is taken off."""
        missing = [each for each in module.parameters if each.name not in self.here and each.name not in self.coming]
        if missing:
            yield self._ask(missing)
        for each in module.parameters:
            number = self.coming.pop(each.name, None)
            if number is not None:
                yield Wait(number)
            self.here.add(each.name)
        wanted = {each.name for each in module.parameters if self.looked.get(each.name, _NEVER) < place}
        taken: set[str] = set()
        while self.queue and len(taken) < len(wanted):
            each, at = self.queue.popleft()
            self.looked[each.name] = at
            taken.add(each.name)

    def _prefetch(self) -> Iterator[Event]:
        """What comes next in the trace, until a bucket is full or too much is held."""
        room = min(self.zero.live - self.elements, self.zero.prefetch_bucket)
        chosen: dict[str, Parameter] = {}
        elements = 0
        while self.queue and elements < room:
            each, at = self.queue.popleft()
            self.looked[each.name] = max(self.looked.get(each.name, _NEVER), at)
            if each.name not in self.here and each.name not in self.coming and each.name not in chosen:
                chosen[each.name] = each
                elements += each.numel
        if chosen:
            yield self._ask(list(chosen.values()))

    def _release(self, module: Module, place: int) -> None:
        """What is not used again soon goes (__params_to_release).

        A next use that the queue was searched for keeps a parameter; so does one at once, since the modules around this
        one, which hold nothing and are left out here, count as steps there.
        """
        going = {
            each.name: each
            for each in module.parameters
            if each.name not in self.stay and self.looked.get(each.name, _NEVER) < place
        }
        passed = 0
        for use in self.order[place:]:
            if passed >= self.zero.reuse or not going:
                break
            for each in use.module.parameters:
                going.pop(each.name, None)
            passed += use.module.numel
        self.here -= going.keys()
        self.elements -= sum(each.numel for each in going.values())

    def _ask(self, wanted: Sequence[Parameter]) -> Ask:
        number = self._next()
        for each in wanted:
            self.coming[each.name] = number
            self.elements += each.numel if each.name not in self.stay else 0
        size = sum(padded(each.numel, self.world) for each in wanted)
        return Ask(Call("all_gather", size * self.element_bytes), number)

    def _reduce(self, held: Sequence[Parameter], pending: list[int]) -> Iterator[Event]:
        size = sum(padded(each.numel, self.world) for each in held)
        number = self._next()
        yield Ask(Call("reduce_scatter", size * self.element_bytes), number)
        if self.zero.overlap:
            pending.append(number)
        else:
            yield Wait(number)

    def _next(self) -> int:
        self.number += 1
        return self.number


def _work(use: Use) -> Work:
    module = use.module
    if not module.works:
        return Work(0)
    again = sum(each.numel for each in module.parameters if each.trained) if use.backward else 0
    return Work(module.numel + again)


def _alone(call: Call, number: int) -> Iterator[Event]:
    yield Ask(call, number)
    yield Wait(number)
