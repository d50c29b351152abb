"""One training step under ZeRO as a list of events: computation, starts of collectives, waits for them.

Pure. It repeats what DeepSpeed 0.19.8 does from the third step on, once it knows the order of modules; in the first two
steps of stage 3 it records that order and gathers each module alone (zero/partitioned_param_coordinator.py).
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
    """Computation, as the number of multiplied elements: each parameter counts once in the forward pass, and in the
    backward pass once, or twice where it is trained.
    """

    elements: int


@dataclass(frozen=True)
class Ask:
    """The start of a collective. ``number`` identifies it for the ``Wait`` that follows."""

    call: Call
    number: int


@dataclass(frozen=True)
class Wait:
    """A wait until the collective with this number is done; the rank computes nothing meanwhile."""

    number: int


Event = Work | Ask | Wait


@dataclass(frozen=True)
class Use:
    """One run of a module, forward or backward."""

    module: Module
    backward: bool


def uses(modules: Sequence[Module], recompute: bool) -> list[Use]:
    """The modules in the order in which they run in a step: forward, then backward. With ``recompute`` (activation
    checkpointing) each block runs forward again before its backward pass.
    """
    order = [Use(module, backward=False) for module in modules]
    again: set[int] = set()
    for module in reversed(modules):
        if recompute and module.block is not None and module.block not in again:
            again.add(module.block)
            block = [each for each in modules if each.block == module.block]
            if any(each.backward for each in block):
                order += [Use(each, backward=False) for each in block]
        if module.backward:
            order.append(Use(module, backward=True))
    return order


def traffic(modules: Sequence[Module], zero: Zero, world: int, element_bytes: int, backend: Backend) -> Traffic:
    """The collectives of one step. ``element_bytes``: bytes per element, 2 in bf16 and fp16, 4 in fp32."""
    calls = [event.call for event in events(modules, zero, world, element_bytes) if isinstance(event, Ask)]
    return Traffic(tuple(calls), world, backend)


def events(modules: Sequence[Module], zero: Zero, world: int, element_bytes: int) -> Iterator[Event]:
    """The events of one step after the first two. With one rank there are no collectives."""
    if zero.stage == 3:
        generated = _Stage3(modules, zero, world, element_bytes).events()
    else:
        generated = _replicated(modules, zero, element_bytes)
    for event in generated:
        if world > 1 or isinstance(event, Work):
            yield event


def _replicated(modules: Sequence[Module], zero: Zero, element_bytes: int) -> Iterator[Event]:
    """The events of stages 0 to 2, where every rank holds all parameters."""
    number = 0
    pending: list[int] = []
    unsent = deque(buckets([each.numel for each in trained(modules)], zero.reduce_bucket))
    ready, sent = 0, 0
    seen: set[str] = set()
    for use in uses(modules, zero.recompute):
        yield _work(use)
        if not use.backward:
            continue
        ready += sum(each.numel for each in use.module.parameters if each.trained and each.name not in seen)
        seen |= {each.name for each in use.module.parameters}
        # A bucket is sent when the next gradient would overfill it, the last one when all gradients are ready.
        while len(unsent) > 1 and ready > sent + unsent[0]:
            size = unsent.popleft()
            sent += size
            yield Ask(Call("all_reduce", size * element_bytes), number)
            if zero.overlap:
                pending.append(number)
            else:
                yield Wait(number)
            number += 1
    for size in unsent:
        yield Ask(Call("all_reduce", size * element_bytes), number)
        pending.append(number)
        number += 1
    yield from (Wait(each) for each in pending)
    if zero.clip and zero.stage > 0:
        yield from _alone(Call("all_reduce", SCALAR_BYTES), number)
        number += 1
    updated = sum(each.numel for each in trained(modules))
    if zero.stage > 0 and updated:
        yield from _alone(Call("all_gather", updated * element_bytes), number)


@dataclass
class _Stage3:
    """The state of DeepSpeed's parameter coordinator: which parameters are gathered, which are being gathered."""

    modules: Sequence[Module]
    zero: Zero
    world: int
    element_bytes: int
    gathered: set[str] = field(default_factory=set)
    in_flight: dict[str, int] = field(default_factory=dict)
    """Number of the gather of each parameter that is being gathered."""
    number: int = 0
    elements: int = 0
    """Elements of the parameters that are gathered or in flight."""
    fetched_for: dict[str, int] = field(default_factory=dict)
    """The use for which each parameter was fetched last (__most_recent_step_id_param_fetched_for)."""

    def __post_init__(self) -> None:
        self.order = uses(self.modules, self.zero.recompute)
        self.queue = deque((each, step) for step, use in enumerate(self.order) for each in use.module.parameters)
        stay = [each for each in parameters(self.modules) if each.numel <= self.zero.persistence]
        self.stay = {each.name: each for each in stay}
        self.gathered |= self.stay.keys()  # gathered after the step before

    def events(self) -> Iterator[Event]:
        """The events of the whole step."""
        bucket: list[Parameter] = []
        seen: set[str] = set()
        pending: list[int] = []
        yield from self._prefetch()  # the model itself is the first module of the trace, and owns no parameters
        for step, use in enumerate(self.order):
            yield from self._fetch(use.module, step)
            yield from self._prefetch()
            yield _work(use)
            self._release(use.module, step + 1)
            if use.backward:
                for parameter in (
                    parameter for parameter in use.module.parameters if parameter.trained and parameter.name not in seen
                ):
                    seen.add(parameter.name)
                    if (
                        bucket
                        and sum(gradient.numel for gradient in bucket) + parameter.numel > self.zero.reduce_bucket
                    ):
                        yield from self._reduce(bucket, pending)
                        bucket = []
                    bucket.append(parameter)
        if bucket:
            yield from self._reduce(bucket, pending)
        yield from (Wait(number) for number in pending)
        if self.zero.clip:
            yield from _alone(Call("all_reduce", 2 * SCALAR_BYTES), self._next())
        asked = [self._ask([parameter]) for parameter in self.stay.values()]
        yield from asked
        yield from (Wait(ask.number) for ask in asked)

    def _fetch(self, module: Module, step: int) -> Iterator[Event]:
        """Gather what the module lacks, wait for what is in flight, and drop its entries from the trace's queue."""
        missing = [
            parameter
            for parameter in module.parameters
            if parameter.name not in self.gathered and parameter.name not in self.in_flight
        ]
        if missing:
            yield self._ask(missing)
        for parameter in module.parameters:
            number = self.in_flight.pop(parameter.name, None)
            if number is not None:
                yield Wait(number)
            self.gathered.add(parameter.name)
        wanted = {
            parameter.name for parameter in module.parameters if self.fetched_for.get(parameter.name, _NEVER) < step
        }
        taken: set[str] = set()
        while self.queue and len(taken) < len(wanted):
            parameter, use_step = self.queue.popleft()
            self.fetched_for[parameter.name] = use_step
            taken.add(parameter.name)

    def _prefetch(self) -> Iterator[Event]:
        """Gather what the trace uses next, up to the prefetch bucket's size and the limit of live parameters."""
        room = min(self.zero.live - self.elements, self.zero.prefetch_bucket)
        chosen: dict[str, Parameter] = {}
        elements = 0
        while self.queue and elements < room:
            parameter, use_step = self.queue.popleft()
            self.fetched_for[parameter.name] = max(self.fetched_for.get(parameter.name, _NEVER), use_step)
            if (
                parameter.name not in self.gathered
                and parameter.name not in self.in_flight
                and parameter.name not in chosen
            ):
                chosen[parameter.name] = parameter
                elements += parameter.numel
        if chosen:
            yield self._ask(list(chosen.values()))

    def _release(self, module: Module, step: int) -> None:
        """Release the parameters that are not used again soon (__params_to_release).

        A parameter stays if it was already fetched for a later use, or if its next use follows at once: DeepSpeed also
        counts modules without parameters as steps, which this model of it omits.
        """
        going = {
            parameter.name: parameter
            for parameter in module.parameters
            if parameter.name not in self.stay and self.fetched_for.get(parameter.name, _NEVER) < step
        }
        passed = 0
        for use in self.order[step:]:
            if passed >= self.zero.reuse or not going:
                break
            for parameter in use.module.parameters:
                going.pop(parameter.name, None)
            passed += use.module.numel
        self.gathered -= going.keys()
        self.elements -= sum(parameter.numel for parameter in going.values())

    def _ask(self, wanted: Sequence[Parameter]) -> Ask:
        number = self._next()
        for each in wanted:
            self.in_flight[each.name] = number
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
