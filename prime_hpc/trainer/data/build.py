"""The training data of an SFT run, from its config.

data = build_data(trainer)
data.start(progress)              # of the checkpoint; {} at the beginning
batch, progress = data.next()     # collective; `progress` goes into the checkpoint of this step
data.close()
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_hpc.config import Experiment
from prime_hpc.config.sections.sft import SFTSourceConfig
from prime_hpc.config.sections.trainer import FakeDataConfig
from prime_hpc.observe.report import left_out
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.dataset.files import find_data
from prime_hpc.trainer.batching.micro_batches import as_pairs, fake_batch
from prime_hpc.trainer.data.epochs import count_steps, last_row_of, lengths_of
from prime_hpc.trainer.data.messages import SFTDataError
from prime_hpc.trainer.data.prefetch import Prefetcher
from prime_hpc.trainer.data.reference import References, attach
from prime_hpc.trainer.data.samples import RowCounts
from prime_hpc.trainer.data.sources import Chain, Rows, by_all_columns, fingerprint_of, former_fingerprint, version_of
from prime_hpc.trainer.data.stream import BatchShape, MixedOrder, Position, RowOrder, SampleStream
from prime_hpc.trainer.data.workers import Recipe, RowProcesses, RowReader
from prime_hpc.trainer.rank_group import RankGroup

if TYPE_CHECKING:
    from prime_hpc.trainer.trainer import Trainer

Progress = dict[str, int]
_COUNTS = ("rows", "overlong", "truncated", "untrained", "bad", "unended", "unshown")


class FakeData:
    """Random tokens of the configured shape; a batch depends on its position alone."""

    def __init__(self, trainer: "Trainer") -> None:
        config = trainer.experiment.sft.data
        self._sides = trainer.experiment.sft.num_sides
        self._shape = FakeDataConfig(
            batch_size=config.batch_size * self._sides,
            seq_len=seq_len_of(trainer.experiment),
            micro_batch_size=config.micro_batch_size * self._sides,
            length=config.length,
        )
        self._trainer = trainer
        self._position = 0
        self.figures: dict[str, float] = {}

    def start(self, progress: Mapping[str, int]) -> Progress:
        """Start: the number of samples is the position."""
        self._position = progress.get("num_samples", 0)
        return {"num_samples": self._position}

    def last_step(self, start: int, is_stopped: Callable[[], bool] = lambda: False) -> int | None:
        """Return None: random tokens have no end."""
        return None

    def next(self) -> tuple[RankBatch, Progress]:
        """Return the batch at the position."""
        trainer = self._trainer
        batch = fake_batch(
            self._shape,
            trainer.vocab_size,
            trainer.experiment.seed,
            self._position,
            *trainer.part,
        )
        self._position += self._shape.batch_size
        if self._sides > 1:
            batch = as_pairs(batch, scores=trainer.experiment.trains_reward_model)
        return batch, {"num_samples": self._position}

    def close(self) -> None:
        """Nothing to end."""


class RealData:
    """Rows of a data set, shuffled, tokenised and packed ahead."""

    def __init__(self, trainer: "Trainer") -> None:
        """Open it. Collective.
        Raises SFTDataError: the data set, its tokenizer or its columns are not what they must be."""
        experiment = trainer.experiment
        config = experiment.sft.data
        self._config, self._timeout_s = config, experiment.trainer.batch_timeout_s
        save_s = experiment.ckpt.timeout_s if experiment.ckpt else 0.0
        self._ranks = RankGroup(self._timeout_s + save_s)
        recipe = recipe_of(experiment, config, trainer.source, trainer.vocab_size)
        rows = open_together(recipe, self._ranks)
        tokenizer = recipe.load_tokenizer()
        self._rows, self._seed, self._recipe = rows, experiment.seed, recipe
        self._fingerprint = self._known_by(rows.fingerprint)
        self._former = self._known_by(former_fingerprint(rows))
        self._template, self._looks, self._made_by = tokenizer.name, tokenizer.looks, tokenizer.fingerprint
        self._num_rows = rows.num_rows
        num_workers = config.num_workers
        if num_workers is None:
            num_workers = 2 if trainer.device.type == "cuda" else 0
        self._reader: RowReader | RowProcesses
        self._reader = RowProcesses(recipe, num_workers) if num_workers else RowReader(recipe, rows, tokenizer)
        self._shape = shape_of(experiment, tokenizer.pad_id(trainer.vocab_size))
        self._order = self._new_order()
        epochs = None if experiment.trainer.bench else config.num_epochs  # some steps of a bench need no count of all
        self._part, self._most_steps = trainer.part, trainer.last_step
        last_row = None if epochs is None else last_row_of(epochs, self._order.num_rows)
        self._stream = self._new_stream(self._new_order(), last_row)
        self._sums: NDArray[np.float64] | None = None
        preference = experiment.sft.preference
        self.compares = preference is not None and preference.compares
        """Whether batches must carry the starting weights' log-probabilities, see `references`."""
        self._prefetcher: Prefetcher | None = None
        self.figures: dict[str, float] = {}
        """Metrics of the batch taken last."""
        self._rank, self._told_at = trainer.rank, 0
        if trainer.rank == 0:
            logger.info(f"{config.label}: {rows.num_rows:,} rows, template: {tokenizer.name}")
            if isinstance(self._order, MixedOrder):
                logger.info(self._order.words(config.paths))

    def references(self, references: References, step: int = 0) -> tuple[NDArray[np.float64], Iterator[RankBatch]]:
        """Have batches of pairs carry the reference's sums; returns their table and, to compute what it lacks, the
        batches of all rows that will be trained after `step`, from where `start` has put the stream. Collective."""
        self._sums = references.table(self._recipe, self._rows, self._made_by)
        end = self._stream.last_row or self._most_steps  # as of the run that has looked at all up to there
        looks = [version_of(path) for path in self._recipe.found.files]
        own = fingerprint_of(self._fingerprint, self._made_by, *self._recipe.makes, self._shape, end, *looks)
        mark = self._ranks.broadcast(own)  # clocks of nodes differ, and so may what they say of a file
        is_known = references.has_all(mark, self._stream.position.row, step)
        return self._sums, iter(()) if is_known else self._rows_ahead(step, references, mark)

    def _rows_ahead(self, step: int, references: References, mark: int) -> Iterator[RankBatch]:
        order, last_row, position = self._new_order(), self._stream.last_row, self._stream.position
        most = None if last_row is not None else max(0, self._most_steps - step)
        if not isinstance(order, MixedOrder):  # whose next epoch holds other rows than one that was whole
            whole = (-(-position.row // order.num_rows) + 1) * order.num_rows
            last_row = min(whole, last_row or whole)
        stream = self._new_stream(order, last_row)
        stream.start(position)
        for _ in itertools.count() if most is None else range(most):
            if (batch := stream.next()) is None:
                break
            yield batch.ranked
        references.note_all(mark, position.row, step)

    def _new_stream(self, order: RowOrder, last_row: int | None) -> SampleStream:
        share, num_shares = self._part
        return SampleStream(
            self._reader, order, self._shape, self._ranks, share=share, num_shares=num_shares, last_row=last_row
        )

    def start(self, progress: Mapping[str, int]) -> Progress:
        """Begin to make batches from there on; returns what to save before a first step. Collective.
        Raises SFTDataError: the checkpoint is of other data or another order, see `on_change`."""
        position = position_of(progress)
        known = progress.get("data_fingerprint", self._fingerprint)
        if known == self._former != self._fingerprint:
            logger.info(f"the checkpoint knows of {self._config.label} only its name and size, not its rows")
        elif known != self._fingerprint and known != self._known_by(by_all_columns(self._rows)):
            text = (
                "the checkpoint was trained on other rows, or in another order (seed, shuffle), than "
                f"{self._config.label} with its {self._num_rows:,} rows now"
            )
            position = self._begin_again(f"{text}: its position means nothing here", "the new data")
        elif progress.get("data_looks", self._looks) != self._looks:
            text = (
                "the checkpoint was trained with another chat template (or another model.enable_thinking) than "
                f"{self._template} now: put that one back"
            )
            position = self._begin_again(text, "the data as they look now")
        self._stream.start(position)
        return self._progress(position)

    def _begin_again(self, why: str, of: str) -> Position:
        """Begin an epoch, where `sft.data.on_change` has it so; else raise an SFTDataError."""
        if self._config.on_change == "error":
            raise SFTDataError(f"{why}. To begin an epoch of {of}: sft.data.on_change = restart")
        logger.warning(f"{why}. An epoch of {of} begins (sft.data.on_change)")
        return Position()

    def last_step(self, start: int, is_stopped: Callable[[], bool] = lambda: False) -> int | None:
        """Return the step that ends the last of `sft.data.num_epochs`, counted from where `start` has put the stream;
        None: it never ends. Collective.

        Raises:
            StoppedCountingError: rank 0's `is_stopped` says so, before all rows are counted.
            SFTDataError: a row cannot be trained on.
        """
        last_row = self._stream.last_row
        if last_row is None:
            return None
        lengths = lengths_of(self._recipe, self._rows, self._made_by, self._reader, self._ranks, is_stopped)
        steps = 0
        if lengths is not None:
            steps = count_steps(lengths, self._order, self._shape, self._stream.position, last_row)
            epochs = f"{self._config.num_epochs:g} epochs of {self._order.num_rows:,} rows"
            logger.info(f"{self._config.label}: {epochs}: {start + steps:,} steps")
        last = start + self._ranks.broadcast(steps)
        if last == 0:
            raise SFTDataError(f"{self._config.label}: nothing to train in the first {last_row:,} rows of num_epochs")
        return last

    def _new_order(self) -> RowOrder:
        config = self._config
        if config.probabilities is None or not isinstance(self._rows, Chain):
            return RowOrder(self._num_rows, seed=self._seed, shuffle=config.shuffle)
        sizes = self._rows.sizes(self._recipe.found.per_path)
        if 0 in sizes:
            raise SFTDataError(f"{config.paths[sizes.index(0)]}: no row, and sft.data.probabilities gives it a share")
        return MixedOrder(
            sizes,
            config.probabilities,
            until_all=config.stopping_strategy == "all_exhausted",
            seed=self._seed,
            shuffle=config.shuffle,
        )

    def _known_by(self, rows: int | None) -> int:
        """Fingerprint of the stream of rows: of themselves and their order."""
        config = self._config
        if config.probabilities is None:
            return fingerprint_of(rows, config.shuffle, self._seed)
        mixture = (config.probabilities, config.stopping_strategy, self._recipe.found.per_path)
        return fingerprint_of(rows, config.shuffle, self._seed, *mixture)

    def next(self) -> tuple[RankBatch, Progress]:
        """Return this rank's part of the next batch, usually made already, and the progress after it. Collective.
        Raises SFTDataError: a row in it cannot be trained on."""
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._stream, self._config.prefetch, self._timeout_s)
        batch = self._prefetcher.take()
        if batch is None:  # nobody asks for more than `last_step`
            raise SFTDataError(f"{self._config.label}: fewer samples than were counted: do the data change meanwhile?")
        counts = batch.position.counts
        named = {f"data/{k}": float(v) for k, v in zip(_COUNTS, counts.values(), strict=True) if k == "rows" or v}
        self.figures = {
            **named,
            "data/epoch": batch.position.row / self._order.num_rows,
            "data/fill": batch.fill,
            "data/num_pad": float(batch.num_pad),
        }
        if isinstance(self._order, MixedOrder):
            used = self._order.used(batch.position.row)
            self.figures |= {f"data/share/{i}": float(n / max(1, batch.position.row)) for i, n in enumerate(used)}
        if (words := left_out(named)) and self._rank == 0 and counts.rows >= self._told_at:
            logger.warning(f"{self._config.label}: {words}")
            self._told_at = (counts.rows // self._num_rows + 1) * self._num_rows  # again after each epoch
        ranked = batch.ranked if self._sums is None else attach(batch.ranked, self._sums)
        return ranked, self._progress(batch.position)

    def _progress(self, position: Position) -> Progress:
        counts = dict(zip((f"data_{name}" for name in _COUNTS), position.counts.values(), strict=True))
        return {
            "num_samples": position.samples,
            "data_row": position.row,
            "data_sub": position.sub,
            "data_fingerprint": self._fingerprint,
            "data_looks": self._looks,
            **counts,
        }

    def close(self) -> None:
        """End the thread and the processes: at the same step on every rank; not needed after a failure."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._reader.close()


def position_of(progress: Mapping[str, int]) -> Position:
    """Return the stream position that a checkpoint holds; the beginning where it holds none."""
    samples = progress.get("num_samples", 0)
    counts = RowCounts(*(progress.get(f"data_{name}", 0) for name in _COUNTS))
    return Position(progress.get("data_row", samples), progress.get("data_sub", 0), samples, counts)


def seq_len_of(experiment: Experiment) -> int:
    """Longest sample in tokens."""
    return experiment.sft.data.seq_len or experiment.seq_len


def recipe_of(experiment: Experiment, source: SFTSourceConfig, model: Path, vocab_size: int) -> Recipe:
    """How rows of a source become samples. `source`: training or held-out rows.
    Raises SFTDataError: no file is there."""
    config = experiment.sft.data
    try:
        found = find_data(source)
    except ValueError as error:
        raise SFTDataError(f"sft data: {error}") from error
    return Recipe(
        source=source,
        config=config,
        found=found,
        cache=config.cache_dir or experiment.output_dir.absolute() / ".sft-cache",
        tokenizer=model,
        trust_remote_code=experiment.model.trust_remote_code,
        enable_thinking=experiment.model.enable_thinking,
        seq_len=seq_len_of(experiment),
        vocab_size=vocab_size,
        sees_images=experiment.model.vision is not None,
    )


def shape_of(experiment: Experiment, pad_id: int) -> BatchShape:
    """Return the batch shape of the config."""
    config = experiment.sft.data
    return BatchShape(
        batch_size=config.batch_size,
        batch_tokens=config.batch_tokens,
        micro_batch_tokens=experiment.micro_batch_tokens,
        pack=config.pack,
        rows=config.micro_batch_size,
        pad_multiple=config.pad_multiple,
        pad_id=pad_id,
        mean_length=seq_len_of(experiment) / 2,
    )


def open_together(recipe: Recipe, ranks: RankGroup) -> Rows:
    """Open the rows: rank 0 makes what is missing, then the others open it. Collective.
    Raises SFTDataError: the same on every rank."""
    rows: Rows | None = None
    said: str | None = None
    if ranks.rank == 0:
        rows, said = _try_open(recipe)
    said = ranks.broadcast(said)
    if said is None and rows is None:
        rows, said = _try_open(recipe)
    failures = [text for text in ranks.gather_all(said) if text is not None]
    if failures or rows is None:
        raise SFTDataError(failures[0])
    return rows


def _try_open(recipe: Recipe) -> tuple[Rows | None, str | None]:
    try:
        return recipe.open_rows(), None
    except SFTDataError as error:
        return None, str(error)


def build_data(trainer: "Trainer") -> FakeData | RealData:
    """Return the data of the config. Collective. Raises SFTDataError: see `RealData`."""
    fake = trainer.experiment.sft.data.type == "fake"
    return FakeData(trainer) if fake else RealData(trainer)


def without_padding(metrics: dict[str, float]) -> None:
    """Tokens and FLOPs count what is real, not what only fills rows."""
    filling = metrics.pop("data/num_pad", 0.0)
    if filling:
        metrics["data/pad_share"] = filling / metrics["num_tokens"]
        metrics["step_flops"] *= 1 - metrics["data/pad_share"]
        metrics["num_tokens"] -= filling
