"""The Trainer of transformers on a tiny model with random weights: nothing is downloaded."""

from __future__ import annotations

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

STEPS = 3


def main() -> None:
    torch.manual_seed(42)
    config = BertConfig(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        # The Trainer seeds all ranks alike, and with dropout they would draw the same masks: a finding.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    data = [
        {"input_ids": torch.randint(16, (6,)), "attention_mask": torch.ones(6).long(), "labels": number % 2}
        for number in range(32)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=data)
        trainer.train()
        if trainer.is_world_process_zero():
            print(f"{trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
