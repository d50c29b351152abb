"""The fine-tune with DeepSpeed: communicator, model, LoRA, engine, steps, checkpoint."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.advise.precision import Capability, Precision, choose, need
from tunetool.advise.qwen2_5_vl import LORA_TARGETS
from tunetool.checkpoint.steps import fsync
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure import page_cache
from tunetool.training.data import batches
from tunetool.training.model.reference_model import describe, load
from tunetool.training.preflight import need_absent, need_memory
from tunetool.training.rank.gpu_reading import least_of_ranks, of_gpu
from tunetool.training.rank.recorder import Recorder
from tunetool.training.trainers.deepspeed_config import ds_config
from tunetool.training.workload import Workload

ALPHA = 2
"""lora_alpha divided by LoRA's rank; LLaMA-Factory's default."""
WARM_UP = 0.1
"""Share of the steps in which the learning rate rises; afterwards it falls to 0 along a cosine."""

Made = Generator[tuple[batches.Batch, batches.Cost], None, None]


@dataclass
class Trainer:
    """The training of one rank with DeepSpeed."""

    workload: Workload
    recorder: Recorder
    local_world: int
    cuda: bool = False
    precision: Precision = field(init=False)

    def run(self) -> None:
        """Train, from imports to checkpoint. Raises ``CannotJudge`` or ``UsageProblem`` where it cannot."""
        with self.recorder.phase("imports"):
            self._import()
        self._check()
        with self.recorder.phase("communicator"):
            self._communicator()
            self._choose_precision(self._least_capability())
        if self.workload.cold:
            self.drop()
        model = self._load()
        from tunetool.training.data.dataset import Samples

        samples = Samples(Path(self.workload.dataset), Path(self.workload.model), self.workload.entry)
        plan = self._plan(len(samples))
        with self.recorder.phase("engine"):
            engine = self._engine(model, len(plan))
        self._train(engine, samples, plan)
        if self.workload.checkpoint is not None:
            self._save(engine, Path(self.workload.checkpoint))
        self._leave()

    def _import(self) -> None:
        """Import the libraries, which takes seconds, so that no other phase includes it."""
        import deepspeed
        import peft  # noqa: F401  (imported here, used later)
        import torch
        import transformers
        from transformers import (
            Qwen2_5_VLForConditionalGeneration,  # noqa: F401  (transformers imports it when it is named)
        )

        from tunetool.loading import parallel  # noqa: F401  (the same)
        from tunetool.training.data import dataset  # noqa: F401  (the same)

        transformers.utils.logging.set_verbosity_error()
        self.cuda = self._wants_cuda(torch)
        if not self.cuda:
            # DeepSpeed would compile this op during the job, and wait for ever for another process's lock on it. It
            # only speeds up all-reduces between ranks that DeepSpeed's launcher started, which no other launcher has.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        torch.manual_seed(self.workload.seed)

    def _wants_cuda(self, torch: Any) -> bool:
        wanted = self.workload.device
        if wanted == "cpu":
            return False
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if wanted == "auto" and seen == 0:
            return False
        if seen <= self.recorder.local_rank:
            raise CannotJudge(
                f"rank {self.recorder.rank} needs GPU {self.recorder.local_rank}, but torch sees {seen} GPU(s)",
                "start as many ranks as there are GPUs (`--ranks-per-node`), or train on `--device cpu`",
            )
        return True

    def _check(self) -> None:
        """Raise for an existing checkpoint and for too little memory, which would otherwise end the run late."""
        if self.workload.checkpoint is not None:
            need_absent(Path(self.workload.checkpoint))
        if not self.cuda and self.recorder.local_rank == 0:
            need_memory(describe(self.workload.model).parameters, self.workload.full, self.local_world)

    def _communicator(self) -> None:
        """Create the process group and run its first collective, which connects the ranks."""
        import deepspeed
        import torch

        if self.cuda:
            torch.cuda.set_device(self.recorder.local_rank)
            self.recorder.device = torch.cuda.get_device_name()
        deepspeed.init_distributed(dist_backend="nccl" if self.cuda else "gloo", verbose=False)
        count = torch.ones(1, device=self._device)
        torch.distributed.all_reduce(count)
        self._synchronize()
        if int(count.item()) != self.recorder.world:
            raise CannotJudge(f"{int(count.item())} of {self.recorder.world} ranks answered the first collective")

    def _capability(self) -> Capability | None:
        """Compute capability of this rank's GPU; None on a CPU."""
        return of_gpu(self.recorder.local_rank) if self.cuda else None

    def _least_capability(self) -> Capability | None:
        """The least compute capability of all ranks' GPUs. A collective; None on CPUs."""
        return least_of_ranks(self.recorder.local_rank) if self.cuda else None

    def _choose_precision(self, least: Capability | None) -> None:
        """Raises ``UsageProblem`` where the GPUs lack what was asked for."""
        capabilities = [least] if least is not None else []
        self.precision = need(choose(self.workload.precision, capabilities), capabilities)
        note_precision(self.recorder, self.precision)

    def drop(self) -> None:
        """Drop model and data from the page cache, on one rank of each node while the others wait."""
        import torch

        if self.recorder.local_rank == 0:
            for directory in (self.workload.model, self.workload.dataset):
                # Symbolic links too: Hugging Face's caches consist of them.
                for path in Path(directory).rglob("*"):
                    if path.is_file():
                        page_cache.drop_file(path)
        torch.distributed.barrier()

    def _load(self) -> Any:
        workload, recorder = self.workload, self.recorder
        with recorder.phase("model_load"), recorder.reading("model"):
            loaded = load(Path(workload.model), self._device, workload.loader, self.precision.dtype)
            self._synchronize()
        recorder.model_bytes = loaded.bytes
        model = loaded.model
        model.config.use_cache = False
        if not workload.full:
            model = _with_lora(model, workload)
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        recorder.parameters = sum(size for size, _ in sizes)
        recorder.trainable = sum(size for size, trains in sizes if trains)
        return model

    def _plan(self, samples: int) -> list[list[int]]:
        """Sample numbers of this rank's batches, one list for each step."""
        workload, recorder = self.workload, self.recorder
        per_epoch = batches.steps_per_epoch(samples, workload.batch_size, recorder.world)
        wanted = workload.steps if workload.steps is not None else workload.epochs * per_epoch
        plan: list[list[int]] = []
        for epoch in range(-(-wanted // per_epoch)):
            plan += batches.order(samples, epoch, recorder.rank, recorder.world, workload.batch_size, workload.seed)
        return plan[:wanted]

    def _optimizer(self, model: Any, steps: int) -> tuple[Any, Any]:
        """The optimizer and its learning-rate schedule, which is advanced once per step."""
        import torch
        from transformers import get_cosine_schedule_with_warmup

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # torch's AdamW, since DeepSpeed would compile an op for its own.
        optimizer = torch.optim.AdamW(trained, lr=self.workload.learning_rate, weight_decay=0.0)
        return optimizer, get_cosine_schedule_with_warmup(optimizer, round(WARM_UP * steps), steps)

    def _engine(self, model: Any, steps: int) -> Any:
        import deepspeed

        optimizer, schedule = self._optimizer(model, steps)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=schedule,
            config=ds_config(self.workload, self.recorder.world, self.cuda, self.precision.format == "fp16"),
        )
        engine.train()
        self._synchronize()
        return engine

    def _train(self, engine: Any, samples: Any, plan: Sequence[Sequence[int]]) -> None:
        recorder, step = self.recorder, 0
        asked = time.monotonic()
        made = self._batches(samples, plan)
        with contextlib.closing(made):
            for batch, cost in made:
                waited = time.monotonic() - asked
                recorder.count("data", cost.read)
                rate = float(engine.get_lr()[0])
                began = time.monotonic()
                loss, skipped = self._step(engine, batch)
                took = time.monotonic() - began
                tokens, images = int(batch["attention_mask"].sum()), len(batch.get("image_grid_thw", ()))
                recorder.step(waited, cost.seconds, took, loss, rate, tokens, images, skipped=skipped)
                step += 1
                asked = time.monotonic()
        if step != len(plan):
            raise CannotJudge(f"rank {recorder.rank} made {step} of {len(plan)} steps")

    def _batches(self, samples: Any, plan: Sequence[Sequence[int]]) -> Made:
        from tunetool.training.data.dataset import collate

        workers, tell = self.workload.workers, self.recorder.notes.append
        return batches.batches(samples, collate, plan, workers, self.cuda, self.local_world, tell)

    def _step(self, engine: Any, batch: batches.Batch) -> tuple[float, bool]:
        """Run one step until the device has finished it; returns this rank's loss, and whether its update was
        skipped."""
        moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}
        loss = engine(**moved).loss
        with lowest_scale_named():
            engine.backward(loss)
            engine.step()
        self._synchronize()
        return float(loss.item()), not engine.was_step_applied()

    def _save(self, engine: Any, directory: Path) -> None:
        """Save a checkpoint with DeepSpeed, each rank its part. The time includes making it durable (fsync)."""
        import torch

        torch.distributed.barrier()
        with self.recorder.phase("checkpoint"):
            engine.save_checkpoint(str(directory), exclude_frozen_parameters=not self.workload.full)
            torch.distributed.barrier()
            if self.recorder.local_rank == 0:
                for path in page_cache.files_under(directory):
                    fsync(path)
            torch.distributed.barrier()

    def _leave(self) -> None:
        """End the communicator once every rank is done: a rank that ended with it open was once aborted (SIGABRT)."""
        import torch

        torch.distributed.barrier()
        torch.distributed.destroy_process_group()

    @property
    def _device(self) -> str:
        return f"cuda:{self.recorder.local_rank}" if self.cuda else "cpu"

    def _synchronize(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.synchronize()


def note_precision(recorder: Recorder, precision: Precision) -> None:
    """Record the format, and the reason where nobody asked for fp16."""
    recorder.precision = precision.format
    if precision.format == "fp16" and not precision.asked:
        recorder.notes.append(f"computed in {precision}: {precision.why}")


@contextlib.contextmanager
def lowest_scale_named() -> Iterator[None]:
    """DeepSpeed ends a run whose gradients overflow at the smallest loss scale. Raises ``CannotJudge`` for that."""
    try:
        yield
    except Exception as error:
        # DeepSpeed raises a plain Exception, which only its words tell from others.
        if "loss scale already at minimum" not in str(error):
            raise
        raise CannotJudge(
            "fp16: the gradients overflow even at the smallest loss scale",
            "train at a lower rate (`tunetool bench finetune --learning-rate`), or on GPUs with bf16 (compute "
            "capability 8.0 or more)",
        ) from error


def _with_lora(model: Any, workload: Workload) -> Any:
    import peft

    settings = peft.LoraConfig(
        r=workload.lora_rank,
        lora_alpha=ALPHA * workload.lora_rank,
        lora_dropout=0.0,
        target_modules=LORA_TARGETS,
        task_type="CAUSAL_LM",
    )
    try:
        # Adapters keep the model's type: DeepSpeed's engine needs one type for all parameters.
        return peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise UsageProblem(
            f"LoRA does not fit `{workload.model}`: {error}", "is it a Qwen2.5-VL? `--model 7b` builds one"
        ) from None


def train(workload: Workload, recorder: Recorder) -> None:
    """Train one rank with DeepSpeed; the worker's entry point, as in the other trainers' modules."""
    Trainer(workload, recorder, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))).run()
