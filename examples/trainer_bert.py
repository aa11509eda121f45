"""transformers' Trainer: a small BERT learns which module of Python's standard library a line comes from.

Its table of 30,000 words is most of the model, and a batch holds a few hundred of them. Trainer wraps the model itself;
the callback registers the hook with what Trainer has wrapped, and adds to Trainer's logs what was saved. Run it with

    torchrun --nproc-per-node 2 examples/trainer_bert.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from ddp_hooks.integrations.transformers import SkipUnusedCallback
from lines_of_python import MODULES, load

WORDS, LENGTH = 30_000, 24


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small BERT with transformers' Trainer.")
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    tokens, labels = load(WORDS, LENGTH)
    lines = [
        {"input_ids": line, "attention_mask": (line != 0).long(), "labels": label}
        for line, label in zip(tokens, labels, strict=True)
    ]
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
            num_labels=len(MODULES),
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=4e-3,
            average_tokens_across_devices=False,  # there is one label a line
            logging_steps=max(1, steps // 4),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=lines[500:],
            eval_dataset=lines[:500],
            compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(1) == p.label_ids).mean().item()},
        )
        saving = SkipUnusedCallback(trainer)
        trainer.add_callback(saving)
        trainer.train()
        accuracy = trainer.evaluate()["eval_accuracy"]

    if trainer.is_world_process_zero():
        print(f"accuracy on lines from {len(MODULES)} modules: {accuracy:.1%}")
        print(saving.state.stats())


if __name__ == "__main__":
    main()
