"""``tunetool bench offload``: start the ranks of every place, let them make steps in turns, keep the record."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from tunetool.bench.offload import figures, preflight
from tunetool.bench.offload.preflight import Configured, Plan
from tunetool.bench.offload.request import KIND, WARM_UPS, Request
from tunetool.bench.offload.samples import DIRECTIONS, DRAM, Moved, Place, Row, Rung, Step, moved_in
from tunetool.bench.offload.training import OPS, Training, losses_of
from tunetool.errors import CannotJudge, ExitCode
from tunetool.measure import Direction, aio, session
from tunetool.measure.pace import Pace, rounds_of
from tunetool.measure.progress import Progress
from tunetool.measure.rounds import drawn_order
from tunetool.measure.sampling import Counting, again
from tunetool.measure.sequential import free_bytes, takes_direct_io
from tunetool.measure.session import Findings, Result, Session
from tunetool.measure.worker import Missing, foreign_code
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.units import format_size
from tunetool.record import Scalar
from tunetool.tune.check import Classes, differences
from tunetool.tune.goals import parse_mix
from tunetool.tune.request import Request as Search
from tunetool.tune.request import SearchProgress
from tunetool.tune.run import tune
from tunetool.tune.settings import SWEEP, AioSettings, settings_of

_SLACK_BYTES = 4 << 20
"""Bytes that a journal and the system's log may write besides."""
_FULL = 16 << 20
"""Free bytes below which a file system counts as full: less than a transfer."""


def bench(request: Request, progress: SearchProgress, environment: Mapping[str, str] | None = None) -> Result:
    """Search a block where there is none, and train. Without a block that was found, the result is the search's.

    Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start.
    """
    tuned = preflight.check_call(request)
    if request.aio is None and request.target is not None and not request.dry_run and find_spec("deepspeed"):
        # What DeepSpeed lacks, the benchmark itself keeps in its record.
        with suppress(Missing):
            found = tune(_search(request, request.target), progress.search(), environment)
            if found.choice is None or found.code != ExitCode.OK:
                return found
            tuned = found.choice.settings
            progress.say(f"tuned: {tuned}, in `{found.path}`")
    return train(request, progress, tuned, environment)


def train(
    request: Request, progress: Progress, tuned: AioSettings | None, environment: Mapping[str, str] | None = None
) -> Result:
    """Compare ``tuned`` with DeepSpeed's default; None: measure the default alone. Raises as ``bench`` does."""
    return session.run(KIND, request.run, _Offload(request, tuned), progress, environment)


def _search(request: Request, target: Path) -> Search:
    """The search for a block, under the Python that runs this."""
    return Search(
        target=target,
        space=settings_of(SWEEP),
        mix=parse_mix("read=1,write=1"),
        budget=request.budget,
        processes=request.ranks,
        python=Path(sys.executable),
        seed=request.seed,
        run=request.run,
    )


@dataclass
class _Site:
    """A place whose ranks are running."""

    place: Place
    training: Training
    rows: list[Row]
    directory: Path | None = None
    """None for DRAM."""
    stack: BlockStack | None = None
    stamp: int = 0


@dataclass
class _Offload:
    request: Request
    tuned: AioSettings | None
    rows: list[Row] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    facts: dict[str, Scalar] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    missing: CannotJudge | None = None
    """What DeepSpeed lacks here, so that nothing runs."""
    plan: Plan = field(init=False)
    installed: aio.Probe = field(init=False)
    configured: Configured = field(init=False)

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        planned = self.plan = preflight.plan(self.request, self.tuned)
        accelerator = {"DS_ACCELERATOR": "cuda" if planned.gpu else "cpu"}
        self.environment = {**session.environment, **accelerator}
        try:
            self.installed = aio.probe(Path(sys.executable), self.environment)
            # On a GPU DeepSpeed would compile `utils` at the first start.
            for op in (*OPS, *(["utils"] if planned.gpu else [])):
                aio.need(self.installed, op)
        except aio.Missing as error:
            self.missing = error
            session.progress.say(f"left out: {error.line}")
            return
        if planned.gpu and not self.installed.cuda:
            raise CannotJudge(f"torch in `{self.installed.python}` sees no GPU", "use `--device cpu`")
        self._configure(session)
        for line in preflight.announcement(self.request, planned, self.configured):
            session.progress.say(line)

    def _configure(self, session: Session) -> None:
        """Compute the ds_configs, and let DeepSpeed's own classes read them."""
        with (
            session.progress.step("asking DeepSpeed what it computes on", 10),
            Classes(Path(self.installed.python), self.environment) as classes,
        ):
            self.configured = preflight.configure(self.request, self.plan, classes.facts())
            for name, config in self.configured.configs.items():
                path = session.temporary() / f"{name}.json"
                path.write_text(figures.as_json(config))
                for difference in differences(config, classes.parse(path, self.request.ranks)):
                    raise CannotJudge(
                        f"DeepSpeed {self.installed.deepspeed} does not read the configuration as it was written: "
                        f"{difference}",
                        "this version of DeepSpeed spells it in another way",
                    )
                session.raw[f"ds_config-{name}.json"] = figures.as_json(config)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        if self.missing is not None:
            return
        sites = self._sites(session)
        for site in sites:
            self._start(site, session)
        for number in rounds_of(Pace(self.request.rounds)):
            pairs = [(site, row) for site in sites for row in site.rows]
            for site, row in drawn_order(pairs, self.request.seed, number):
                self._sample(site, row, number, session)
        self._catch_up(sites, session)
        for site in sites:
            site.training.end()

    def _sites(self, session: Session) -> list[_Site]:
        """Every place with its directory, and processes that are not started yet."""
        sites = []
        for store in self.plan.stores:
            directory = session.directory(store.directory, store.stack)
            if not takes_direct_io(directory):
                raise CannotJudge(
                    f"`{store.directory}` takes no direct I/O", "choose a directory on another file system"
                )
            rows = [Row(store.name, block, store.stack.medium, store.stack) for block in self.plan.blocks]
            sites.append(self._site(store.name, store.stack.medium, rows, session, directory, store.stack))
        if self.request.dram:
            sites.append(self._site(DRAM.lower(), DRAM, [Row(DRAM.lower(), "", DRAM)], session))
        return sites

    def _site(
        self,
        name: str,
        medium: str,
        rows: list[Row],
        session: Session,
        directory: Path | None = None,
        stack: BlockStack | None = None,
    ) -> _Site:
        place = Place(name, medium)
        self.places.append(place)
        self.rows += rows
        moved = sum(each.read + each.written for each in self.configured.files) if directory is not None else 0
        training = Training(
            name,
            self.request.ranks,
            self.installed,
            self.environment,
            moved + 2 * self.plan.rung_bytes,
            raw=session.raw,
        )
        return _Site(place, session.hold(training), rows, directory, stack)

    def _start(self, site: _Site, session: Session) -> None:
        """Build the engines, which writes parameters and master weights, and make the steps that nobody times."""
        config = self.configured.configs[site.place.name]
        with session.progress.step(f"{site.place.name}: {self.request.ranks} rank(s) start", 30) as tick:
            site.training.tick = tick
            facts = site.training.start(
                preflight.placed(config, site.directory) if site.directory is not None else config,
                self.request.model,
                self.request.tokens,
                self.request.seed,
                self.plan.blocks if site.directory is not None else None,
            )
        self.facts = {name: value for name, value in facts.items() if value}
        for number in range(1, WARM_UPS + 1):
            self._step(site, site.rows[0].block, f"{site.place.name} warm-up-{number}", session)

    def _sample(self, site: _Site, row: Row, number: int, session: Session) -> None:
        row.steps[number] = again(
            f"{row.key}-{number}",
            lambda label: self._step(site, row.block, label, session),
            lambda step: step.judgements,
            row.repeated,
            session.progress.say,
        )
        if site.directory is None:
            return
        for direction in DIRECTIONS[::-1]:
            row.rungs[direction][number] = again(
                f"{row.key} aio {direction}-{number}",
                lambda label: self._rung(site, row.block, direction, label, session),  # noqa: B023  (called at once)
                lambda rung: [rung.counted.judgement if rung.counted is not None else None],
                row.repeated,
                session.progress.say,
            )

    def _step(self, site: _Site, block: str, label: str, session: Session) -> Step:
        """One step, and a look at its swap files."""
        with session.progress.step(label, 0) as tick:
            site.training.tick = tick
            moved: dict[Direction, Moved] = {}
            if site.stack is None:
                answers = site.training.step(block)
            else:
                with Counting(site.stack, f"`{label}`", direct=site.directory) as counting:
                    answers = site.training.step(block)
                for direction in DIRECTIONS:
                    plain = moved_in(answers, direction)
                    counted = counting.count(direction, plain.claimed_bytes, slack=_SLACK_BYTES)
                    moved[direction] = replace(plain, counted=counted, moment=counting.moment)
        loss = losses_of(answers)
        site.place.losses.append(loss)
        self._look_at_files(site, label)
        seconds = max(each["ended"] for each in answers) - min(each["began"] for each in answers)
        return Step(seconds, loss, moved)

    def _look_at_files(self, site: _Site, label: str) -> None:
        """Compare the swap files with what DeepSpeed must have written: its handle reports success on a full disk."""
        if site.directory is None:
            return
        site.place.looks += 1
        site.place.file_bytes = self.configured.file_bytes
        short = preflight.shortfall(self.configured, site.directory)
        if short is None:
            return
        what, missing = short
        free = free_bytes(site.directory)
        if missing and free < max(_FULL, missing):
            raise CannotJudge(
                f"`{site.directory.parent}` is full, {format_size(free)} free; DeepSpeed went on, and after {label} "
                f"{what}",
                "free some space, or use a smaller model",
            )
        site.place.wrong_files = site.place.wrong_files or f"after {label}: {what}"

    def _rung(self, site: _Site, block: str, direction: Direction, label: str, session: Session) -> Rung:
        """The handle alone, on a file beside the swap files."""
        assert site.stack is not None  # noqa: S101  (no handle moves what is in DRAM)
        assert site.directory is not None  # noqa: S101  (as above)
        settings, size = self.plan.blocks[block], self.plan.rung_bytes
        site.stamp += 1
        order = {
            "direction": direction,
            "stamp": site.stamp,
            "file": str(site.directory / "rung-%d"),
            "files": site.training.files()["async_io"],
            "io_bytes": size,
            "device": "cpu",
            "block_bytes": settings["block_size"],
            **{name: settings[name] for name in ("queue_depth", "single_submit", "overlap_events")},
            "intra_op_parallelism": settings["intra_op_parallelism"],
            "pinned_by": "deepspeed",
            "shared_memory": self.installed.needs_pin_memory,
            "keep": sum(map(preflight.requests, self.plan.blocks.values())),
        }
        with session.progress.step(label, size * self.request.ranks / 1e9) as tick:
            site.training.tick = tick
            if site.stamp == 1:
                # The first one makes the file, too.
                site.training.rung(order)
            with Counting(site.stack, f"`{label}`", direct=site.directory) as counting:
                answers = site.training.rung(order)
        claimed = sum(int(each["bytes"]) for each in answers)
        counted = counting.count(direction, claimed, slack=_SLACK_BYTES)
        return Rung(claimed, max(float(each["seconds"]) for each in answers), counted, counting.moment)

    def _catch_up(self, sites: list[_Site], session: Session) -> None:
        """Let DRAM make as many steps as the other places, so that every loss has one to be compared with."""
        most = max(len(site.place.losses) for site in sites)
        for site in sites:
            while site.directory is None and len(site.place.losses) < most:
                self._step(site, "", f"{site.place.name} step-{len(site.place.losses) + 1}", session)

    def findings(self) -> Findings:
        """See ``session.Work``."""
        request = self.request
        conditions: dict[str, Scalar] = {
            "model": request.model,
            "parameters": self.plan.model.numel,
            "parameters_on": request.parameters,
            "ranks": request.ranks,
            "tokens": request.tokens,
            "micro_batch": request.micro_batch,
            "rounds": request.rounds,
            "seed": request.seed,
            **self.facts,
        }
        if self.missing is None:
            config = next(iter(self.configured.configs.values()))
            conditions |= {
                "precision": self.configured.precision,
                "sub_group_elements": config["zero_optimization"]["sub_group_size"],
                "pipelined": bool(config["zero_optimization"]["offload_optimizer"].get("pipeline_write", False)),
                "rung_bytes": self.plan.rung_bytes,
                "swap_bytes": self.configured.file_bytes,
            }
        doubts = foreign_code(self.environment)
        return Findings(
            figures.case(self.rows, self.places, conditions, self.plan.blocks, doubts, self.missing),
            target=", ".join(store.stack.directory for store in self.plan.stores),
            stack=self.plan.stores[0].stack,
        )
