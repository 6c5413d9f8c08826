"""The Trainer of transformers on a small GPT-2 with random weights: `tiny_trainer.py --dropout 0.1`."""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dropout", type=float, default=0.0)
    dropout = parser.parse_args().dropout
    torch.manual_seed(42)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(64, (48, 12))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=3,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
        trainer.train()
        weight = float(sum(parameter.detach().double().sum() for parameter in trainer.model.parameters()))
        print(f"{trainer.state.global_step} steps, weights sum to {weight:.12f}", flush=True)


if __name__ == "__main__":
    main()
