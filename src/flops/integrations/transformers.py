"""`ForwardTrainer`: the Trainer of transformers, without a backward pass.

Each micro-batch of n of the N points of a step adds its share to ``.grad``,

    gradient = sum over micro-batches of (n / N) estimate(micro-batch),

so that the sum is the estimate of the whole batch. Everything else is the Trainer's own:
optimizer, schedule, clipping, callbacks, evaluation, checkpoints.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from flops.allocators.base import Allocator
from flops.allocators.gaussian import Feature
from flops.engine.auto_groups import automatic_groups
from flops.engine.collectives import Collectives
from flops.engine.forward_gradient import ForwardGradient
from flops.engine.groups import Group
from flops.engine.report import StepReport
from flops.errors import FlopsError
from flops.estimators.base import Estimator
from flops.estimators.likelihood_ratio import default_sigma
from flops.integrations.model_card import append_section
from flops.integrations.peft import prompt_parameters, prompts_by_row
from flops.integrations.rows import ROWS, NumberedCollator, NumberedRows, points_in
from flops.integrations.totals import Totals
from flops.integrations.training_arguments import REFUSED, accept
from flops.losses import Classification, LabelWords, Seq2SeqLM, from_model
from flops.losses.base import base_model
from flops.optional import require
from flops.passes.batch import LossFunction, wide
from flops.passes.checks import unwrap
from flops.passes.ranks import Parallel
from flops.storage.files import replacing
from flops.training.checkpoint import UNREADABLE, save_state
from flops.training.methods import AUTOMATIC_SIGMA, FIXED_QUERIES, Method, MethodName, engine

prepare_data_loader = require("accelerate", "llm").data_loader.prepare_data_loader
Trainer = require("transformers", "llm").Trainer

STATE = "flops.pt"  # in a checkpoint: engine with allocators and subspaces, totals, prompt encoder
SCHEMA = 1
QUERIES = 20.0
logger = logging.getLogger(__name__)

Groups = Sequence[Group] | Callable[[nn.Module], Sequence[Group]]


class ForwardTrainer(Trainer):  # type: ignore[misc, valid-type]
    """A transformers Trainer whose training step estimates instead of differentiating.

    All arguments of `transformers.Trainer` are taken, and those below by keyword. A step costs
    ``queries`` forward passes per point and group, counted in the logs as ``queries`` and
    ``forward_equivalents``. The model stays in evaluation mode, so that queries differ by their
    noise alone. Launched with torchrun, every process trains on its own batches, as with the stock
    Trainer, and a step is that of all their points; or all share the queries of the same batches.

    Args:
        model: A transformers or PEFT model; any module with `loss`.
        args: TrainingArguments. ``seed`` is also the key of all noise.
        positional: Further arguments of Trainer.
        method: One of `flops.training.methods`, or a `Method`; "shaped-lr" by default.
        queries: Mean queries per point and group, or "auto"; 20 by default.
        sigma: Noise scale; None chooses it as training goes on for shaped-lr, and by the model's
            precision for the others.
        groups: What is perturbed together, instead of a method; a function of the model where
            ``model_init`` makes it.
        estimator: Instead of a method: one for automatic groups.
        allocator: How queries are spread over the points, with `groups` or `estimator`.
        loss: ``losses = loss(outputs, labels)``, one per row; None derives it from the model
            (`flops.losses.from_model`).
        chunk: Most rows in a pass.
        parallel: What processes share: "data", each has its own batches, or "query", all load the
            same batches and share their queries, for few points with many queries.
        options: Further arguments of Trainer.

    Attributes:
        totals: Queries and cost of the run.
        report: What the last micro-batch saw and cost.

    Raises:
        FlopsError: For arguments that make sense with a backward pass only; the message says what
            to do instead.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        *positional: Any,
        method: MethodName | Method | None = None,
        queries: float | Literal["auto"] | None = None,
        sigma: float | None = None,
        groups: Groups | None = None,
        estimator: Estimator | None = None,
        allocator: Allocator | None = None,
        loss: LossFunction | None = None,
        chunk: int | None = None,
        parallel: Parallel = "data",
        **options: Any,
    ) -> None:
        self._parallel = parallel
        self._method, self._queries, self._sigma = method, queries, sigma
        self._groups, self._estimator, self._allocator = groups, estimator, allocator
        self._chunk, self._given_loss = chunk, loss
        self._check_options(options)
        self._engine: ForwardGradient | None = None
        self._shares: deque[float] = deque()  # of the step's points, in each micro-batch
        self._told_of_dropout = False
        self.totals = Totals()
        self.report: StepReport | None = None
        super().__init__(model, None if args is None else accept(args), *positional, **options)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # by accelerate's own configuration
            raise FlopsError(f"ForwardTrainer: {REFUSED['fsdp']}")
        self.loss = self._choose_loss()
        self.label_smoother = None  # the loss smooths
        # The Trainer would count tokens to weight micro-batches by; here rows count alike.
        self.model_accepts_loss_kwargs = False

    def _check_options(self, options: Mapping[str, Any]) -> None:
        ways = {"method": self._method, "groups": self._groups, "estimator": self._estimator}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"give one of method, groups and estimator, not {' and '.join(given)}")
        own = {"queries": self._queries, "sigma": self._sigma}
        doubled = [name for name, value in own.items() if value is not None]
        if doubled and (self._groups is not None or isinstance(self._method, Method)):
            raise ValueError(f"{doubled[0]} is part of the {given[0]} that were given")
        if self._sigma is not None and self._estimator is not None:
            raise ValueError("sigma is part of the estimator that was given")
        if self._queries is not None and self._method in FIXED_QUERIES:
            raise ValueError(
                f"queries of {self._method} are its authors'; give groups, such as "
                f"groups=lambda model: flops.presets.{self._method}(model, queries=8)"
            )
        if self._allocator is not None and self._groups is None and self._estimator is None:
            raise ValueError("a method has its own allocator; give it with groups or estimator")
        if options.get("compute_loss_func") is not None:
            raise FlopsError(
                "compute_loss_func returns one loss for the batch; give a function of (outputs, "
                "labels) that returns one per row as loss=, such as those in flops.losses"
            )

    def _choose_loss(self) -> LossFunction:
        smoothing = self.args.label_smoothing_factor
        if self._given_loss is None:
            return from_model(self.model, label_smoothing=smoothing)
        if smoothing:
            raise FlopsError(
                "label_smoothing_factor acts on the loss that follows from the model; smooth the "
                "labels in your own, for example with flops.losses.CausalLM(label_smoothing=0.1)"
            )
        return self._given_loss

    @property
    def engine(self) -> ForwardGradient:
        """The engine for the model as it is now; made when it is first needed."""
        if self._engine is None:
            self._engine = self._new_engine()
            self._engine.parallel = self._parallel
        return self._engine

    def _new_engine(self) -> ForwardGradient:
        model, seed = unwrap(self.model), self.args.seed
        groups = self._groups(model) if callable(self._groups) else self._groups
        if self._estimator is not None:
            queries = QUERIES if self._queries is None else self._queries
            groups = automatic_groups(dict(model.named_modules()), self._estimator, queries)
        if groups is not None:
            return ForwardGradient(
                model, self.loss, groups, allocator=self._allocator, seed=seed, chunk=self._chunk
            )
        # Losses that are not those of a few classes are where tanh saturates.
        few = isinstance(self.loss, Classification | LabelWords)
        feature: Feature | None = None if few else "standardised"
        return engine(model, self.loss, self.method, seed=seed, chunk=self._chunk, feature=feature)

    @property
    def method(self) -> Method:
        """The method with its hyperparameters; of no use where groups or an estimator are given."""
        if isinstance(self._method, Method):
            return self._method
        found = Method(
            self._method or "shaped-lr", QUERIES if self._queries is None else self._queries
        )
        if self._sigma is not None:
            return replace(found, sigma=(self._sigma,))
        if found.name in AUTOMATIC_SIGMA:
            return found
        floating = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        dtype = torch.bfloat16 if self.args.bf16 else next(floating, torch.float32)
        return found if found.perturbs is None else replace(found, sigma=(default_sigma(dtype),))

    def train(self, *args: Any, **options: Any) -> Any:
        """Train, or resume; see `transformers.Trainer.train`."""
        self._engine, self.totals = None, Totals()
        self._shares.clear()
        return super().train(*args, **options)

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Estimate the gradient of a micro-batch, and add its share to ``.grad``."""
        self._without_dropout()
        train = getattr(self.optimizer, "train", None)  # of schedule-free optimizers
        if callable(train):
            train()
        share = self._shares.popleft() if self._shares else 1.0
        arguments, labels, rows = self._split(self._prepare_inputs(dict(inputs)))
        with prompts_by_row(self.engine.model), self.compute_loss_context_manager():
            self.report = self.engine.estimate(arguments, labels, index=rows, scale=share)
        self.totals.add(self.report)
        return torch.tensor(self.report.loss * share, device=self.args.device)

    def _without_dropout(self) -> None:
        self.engine.model.eval()
        if self._told_of_dropout:
            return
        self._told_of_dropout = True
        on = [m for m in self.engine.model.modules() if isinstance(m, nn.Dropout) and m.p > 0]
        if on:
            logger.warning(
                "dropout is off (%d modules): queries must differ by their noise alone", len(on)
            )

    def _split(self, batch: dict[str, Any]) -> tuple[dict[str, Any], Any, Tensor | None]:
        """Arguments of the model, labels for the loss, and rows of the data set if known."""
        rows = batch.pop(ROWS, None)
        if rows is not None and len(rows.unique()) < len(rows):
            rows = None  # a sampler that repeats points: their noise must differ
        labels = {name: batch.pop(name) for name in self.label_names if name in batch}
        mask = batch.get("attention_mask")
        if isinstance(self.loss, LabelWords) and mask is not None and not bool(mask[:, -1].all()):
            raise FlopsError(
                "label words are read at the last position, where some rows have padding; pad on "
                "the left: tokenizer.padding_side = 'left'"
            )
        if isinstance(self.loss, Seq2SeqLM) and "decoder_input_ids" not in batch and labels:
            base: Any = base_model(unwrap(self.model))
            shifted = base.prepare_decoder_input_ids_from_labels(next(iter(labels.values())))
            batch["decoder_input_ids"] = shifted
        return batch, next(iter(labels.values()), None) if len(labels) < 2 else labels, rows

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The mean of the losses of the rows, for evaluation: what training minimises."""
        arguments, labels, _ = self._split(dict(inputs))
        outputs = model(**arguments)
        losses = self.loss(wide(outputs), labels)
        if isinstance(outputs, Tensor):
            outputs = {"logits": outputs}
        return (losses.mean(), outputs) if return_outputs else losses.mean()

    def get_train_dataloader(self) -> Any:
        """The training data in batches of each process, with their rows."""
        if self.train_dataset is None:
            raise ValueError("ForwardTrainer: training requires a train_dataset")
        args, collate, dataset = self.args, self.data_collator, self.train_dataset
        streamed = isinstance(dataset, IterableDataset)
        if hasattr(dataset, "column_names") and not streamed:  # of the library datasets
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        options: dict[str, Any] = {"batch_size": self._train_batch_size}
        if not streamed:
            sampler = self._get_train_sampler(dataset)
            if args.train_sampling_strategy == "batch_rebalance":
                options = {"batch_sampler": sampler}
            else:
                options |= {"sampler": sampler, "drop_last": args.dataloader_drop_last}
            dataset, collate = NumberedRows(dataset), NumberedCollator(collate)
        loader = DataLoader(
            dataset,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            **options,
        )
        return prepare_data_loader(
            loader,
            args.device,
            num_processes=args.world_size if self._parallel == "data" else 1,
            process_index=args.process_index if self._parallel == "data" else 0,
            put_on_device=self.accelerator.device_placement,
            use_seedable_sampler=self.accelerator.use_seedable_sampler,
            data_seed=args.data_seed,
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        """Points of a step: of all processes, unless these share its queries."""
        points = int(self._train_batch_size * args.gradient_accumulation_steps)
        return points * args.world_size if self._parallel == "data" else points

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        """The micro-batches of a step; points of all processes are counted, to weight them."""
        batches, items = super().get_batch_samples(*args, **options)
        sizes = [float(points_in(batch)) for batch in batches]
        if self._parallel == "data" and sizes:
            sizes = Collectives.of("auto").sum_scalars(sizes)
        self._shares = deque(size / sum(sizes) for size in sizes)
        return batches, items

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Of the last micro-batch: a forward pass is a third of what the Trainer counts."""
        if self.report is None:
            return 0
        per_point = float(self.report.forward_equivalents) / self.report.points
        # The report is of all processes, and the Trainer adds up their inputs.
        repeated = 1 if self._parallel == "data" else self.args.world_size
        return int(super().floating_point_ops(inputs) / 3 * per_point / repeated)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Add queries and forward equivalents so far, and the means of the groups' statistics."""
        if "loss" in logs:
            logs.update(self.totals.means())
        if "loss" in logs or "train_loss" in logs:
            logs.update(self.totals.sums())
        super().log(logs, *args, **options)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            state = {
                "schema": SCHEMA,
                "engine": self.engine.state_dict(),
                "totals": self.totals.state_dict(),
                "prompt": dict(prompt_parameters(self.engine.model)),
            }
            with replacing(Path(output_dir) / STATE) as scratch:
                save_state(scratch, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / STATE
        if not path.is_file():
            raise FlopsError(
                f"{checkpoint} has no {STATE}: it was saved by another Trainer or with "
                "save_only_model; load its model and start a new run"
            )
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            if state["schema"] != SCHEMA:
                raise FlopsError(f"{path} is of another version of flops; continue with that one")
            self.engine.load_state_dict(state["engine"])
            self.totals = Totals.from_state(state["totals"])
            with torch.no_grad():
                for name, parameter in prompt_parameters(self.engine.model).items():
                    parameter.copy_(state["prompt"][name])
        except UNREADABLE as error:
            raise FlopsError(f"{path} cannot be read: {error}") from error

    def create_model_card(self, *args: Any, **options: Any) -> None:
        """The Trainer's model card, with method, queries and cost."""
        super().create_model_card(*args, **options)
        if self.is_world_process_zero():
            name: str = "groups" if self._groups is not None else self.method.name
            name = type(self._estimator).__name__ if self._estimator is not None else name
            append_section(Path(self.args.output_dir) / "README.md", name, self.engine, self.totals)
