"""What the demo trains: several questions about handwritten digits, in phases that use fewer and fewer parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

PIXELS, PATCH_PIXELS, GREY_LEVELS = 64, 4, 17
VOCABULARY = GREY_LEVELS**PATCH_PIXELS  # every possible patch of 2 x 2 pixels is a word
WORD_FEATURES = 64  # as long as the hook's shortest unit, so that a unit is a row
WORD_TABLE = "words.0.weight"
WORD_PENALTY = 1e-4
LOWER_LAYERS, BRANCH_LAYERS, TEST_SAMPLES = 4, 2, 360


class Task(NamedTuple):
    """A question about a digit; ``answer`` maps a tensor of digits to the classes of their answers."""

    name: str
    classes: int
    answer: Callable[[Tensor], Tensor]


def is_one_of(*digits: int) -> Callable[[Tensor], Tensor]:
    return lambda digit: torch.isin(digit, torch.tensor(digits)).long()


TASKS = (
    Task("which digit", 10, lambda digit: digit),
    Task("even or odd", 2, lambda digit: digit % 2),
    Task("five or more", 2, is_one_of(5, 6, 7, 8, 9)),
    Task("has a loop", 2, is_one_of(0, 6, 8, 9)),
    Task("is a prime", 2, is_one_of(2, 3, 5, 7)),
    Task("multiple of 3", 2, is_one_of(0, 3, 6, 9)),
)


class Phase(NamedTuple):
    """A stretch of training, which skips what the phase before skipped and adds one reason to skip more."""

    title: str
    own_task_only: bool = True
    lower_frozen: bool = True
    branch_in_some_steps: bool = True
    words_penalised: bool = True

    def tasks(self, rank: int, ranks: int, step: int) -> tuple[int, ...]:
        """Return the tasks that ``rank`` trains in ``step``: all, or one that changes from step to step."""
        return ((step * ranks + rank) % len(TASKS),) if self.own_task_only else tuple(range(len(TASKS)))

    def takes_branch(self, rank: int, ranks: int, step: int) -> bool:
        """Say whether ``rank`` takes the branch: in four steps every rank does once, a single rank once."""
        if not self.branch_in_some_steps or step % 4 == 0:
            return True
        return step % 4 == 2 and rank == (step // 4) % ranks


PHASES = (
    Phase("everything is used", own_task_only=False, lower_frozen=False, branch_in_some_steps=False),
    Phase("each rank trains its own task", lower_frozen=False, branch_in_some_steps=False),
    Phase("also: lower layers frozen", branch_in_some_steps=False),
    Phase("also: branch only in some steps"),
    Phase("also: only the words of a batch", words_penalised=False),
)

# The prefix of the names of parameters that share a row of the picture, by the row's label.
GROUPS = {
    **{f"lower layer {i + 1}": f"lower.{i}." for i in range(LOWER_LAYERS)},
    "words": "words.",
    "upper layer": "upper.",
    "branch": "branch.",
    **{f"head: {task.name}": f"heads.{i}." for i, task in enumerate(TASKS)},
}


def read_words(pixels: Tensor) -> Tensor:
    """Map images (samples, 64) to words (samples, 16): the number of each patch of 2 x 2 pixels."""
    levels = ((pixels + 1.0) * 8.0).long().view(-1, 4, 2, 4, 2)
    patches = levels.transpose(2, 3).reshape(-1, PIXELS // PATCH_PIXELS, PATCH_PIXELS)
    return (patches * GREY_LEVELS ** torch.arange(PATCH_PIXELS)).sum(dim=2)


class Layer(nn.Module):
    """A residual layer of ``width`` x ``width`` weights.

    Its GELU is smooth, so that runs that differ by one rounding stay 2e-7 apart; with ReLU, they would end 1e-2 apart.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to (batch, width)."""
        return x + functional.gelu(self.linear(self.norm(x)))


class MultiTaskModel(nn.Module):
    """Lower layers beside a large table of words, an upper layer, an optional branch, and one head for each task."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(PIXELS, width), Layer(width))
        self.lower = nn.Sequential(first, *(Layer(width) for _ in range(LOWER_LAYERS - 1)))
        self.words = nn.Sequential(nn.EmbeddingBag(VOCABULARY, WORD_FEATURES), nn.Linear(WORD_FEATURES, width))
        self.upper = Layer(width)
        self.branch = nn.Sequential(*(Layer(width) for _ in range(BRANCH_LAYERS)))
        half = width // 2
        self.heads = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, half), nn.GELU(), nn.Linear(half, task.classes))
            for task in TASKS
        )

    def forward(self, pixels: Tensor, tasks: tuple[int, ...], take_branch: bool) -> list[Tensor]:
        """Return the logits of each of ``tasks``, (batch, classes), for ``pixels``, (batch, 64)."""
        x = self.upper(self.lower(pixels) + self.words(read_words(pixels)))
        if take_branch:
            x = self.branch(x)
        return [self.heads[task](x) for task in tasks]


def compute_loss(
    ddp: nn.Module, pixels: Tensor, digits: Tensor, tasks: tuple[int, ...], take_branch: bool, penalise_words: bool
) -> Tensor:
    """Return the mean cross entropy over ``tasks``; a penalty on all words gives each row of the table a gradient."""
    logits = ddp(pixels, tasks, take_branch)
    losses = [functional.cross_entropy(x, TASKS[task].answer(digits)) for task, x in zip(tasks, logits, strict=True)]
    loss = torch.stack(losses).mean()
    if penalise_words:
        loss = loss + WORD_PENALTY * ddp.get_parameter(f"module.{WORD_TABLE}").square().sum()
    return loss


class Digits:
    """scikit-learn's handwritten digits, shuffled: pixels (samples, 64) in [-1, 1] and digits (samples,)."""

    def __init__(self, seed: int) -> None:
        from sklearn import datasets

        pixels, digits = map(torch.from_numpy, datasets.load_digits(return_X_y=True))
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))
        test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
        pixels = pixels.float() / 8.0 - 1.0
        self.train_pixels, self.train_digits = pixels[train], digits[train].long()
        self.test_pixels, self.test_digits = pixels[test], digits[test].long()

    def batch(self, rank: int, ranks: int, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return this rank's ``batch_size`` samples of ``step``; the ranks walk through the data side by side."""
        first = (step * ranks + rank) * batch_size
        rows = torch.arange(first, first + batch_size) % len(self.train_digits)
        return self.train_pixels[rows], self.train_digits[rows]

    def measure_accuracy(self, model: nn.Module) -> list[float]:
        """Return, for each task, the fraction of test samples that ``model`` answers right."""
        with torch.no_grad():
            logits = model(self.test_pixels, tuple(range(len(TASKS))), True)
        return [
            float((x.argmax(1) == task.answer(self.test_digits)).float().mean())
            for task, x in zip(TASKS, logits, strict=True)
        ]
