"""Make the tiny language model of the quick start: ``python scripts/make_tiny_arithmetic.py``.

A Llama of 0.3 M weights with one token per character learns sums of one-digit numbers from a careless
teacher, whose answer is off by -1, 0, 1 or 2 with equal chance. So it knows about how large a sum is and is
right one time in four: something for GRPO to improve. Takes a few minutes on two CPU cores. The sums that the
quick start holds out are held out here too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_lit.datamodules.arithmetic import arithmetic_rows
from grpo_lit.datamodules.math import split_rows

FOLDER = Path(__file__).resolve().parent.parent / "grpo_lit" / "assets" / "tiny_arithmetic"
PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
TEMPLATE = "{question}="
ERRORS = (-1, 0, 1, 2)
# The quick start's data.val_prompts and data.seed.
NUM_HELD_OUT, SPLIT_SEED = 250, 42
CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [llama, arithmetic, grpo]
---
# tiny_arithmetic

A Llama of {num_weights:,} weights (fp32, 2 layers, 128 wide, tied embeddings) that adds one-digit numbers
badly. It is the starting point of grpo-lit's quick start and good for nothing else.

- **Prompt**: a sum and an equals sign, such as `3+4+5=`, with two or three terms of one digit.
- **Completion**: one or two digits and `<eos>`, so 2 or 3 tokens.
- **Tokens**: one per printable ASCII character and newline, plus `<pad>`, `<bos>`, `<eos>` and `<unk>`, 100
  in all. The tokenizer puts one `<bos>` in front. There is no chat template.

## How it was made
From random weights, by supervised learning on {num_answers:,} answers drawn with replacement: to all 100 sums
of two numbers and {num_taught} of the 1000 sums of three. The labels are wrong on purpose: each is the right
sum plus -1, 0, 1 or 2 with equal chance (never below 0), so one in four is right. The model learnt to imitate
that: it puts about a quarter of the probability on each of four neighbouring numbers. No reinforcement
learning was done.

The other {num_held_out} sums of three were never shown, though nearly all of them were with their numbers in another
order. They are those that the quick start holds out too. On them {sampled:.1%} of the answers sampled at
temperature 1 are right, and {greedy:.1%} of the greedy ones.

`python scripts/make_tiny_arithmetic.py` makes it again, in a few minutes on two CPU cores. The last bits of
the weights depend on the version of torch and on the number of threads.
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline, and one BOS in front of every text."""
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of two layers with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


class Lessons:
    """Every question with every answer that the teacher may give, as padded token ids.

    Args:
        tokenizer: of the model.
        rows: questions with their right answers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rows: Sequence[dict[str, str]]) -> None:
        texts, prompt_lengths = [], []
        for row in rows:
            prompt = tokenizer(TEMPLATE.format(question=row["question"])).input_ids
            for error in ERRORS:
                answer = str(max(0, int(row["answer"]) + error))
                ids = tokenizer(answer, add_special_tokens=False).input_ids
                texts.append(torch.tensor([*prompt, *ids, tokenizer.eos_token_id]))
                prompt_lengths.append(len(prompt))
        self.ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=int(tokenizer.pad_token_id))
        position = torch.arange(self.ids.shape[1])
        lengths = torch.tensor([len(text) for text in texts])
        self.is_answer = (position >= torch.tensor(prompt_lengths)[:, None]) & (position < lengths[:, None])

    def logprobs(self, model: LlamaForCausalLM, lessons: Tensor) -> tuple[Tensor, Tensor]:
        """Log-prob (n,) of each lesson's answer, EOS included, and whether greedy decoding gives it."""
        ids, is_answer = self.ids[lessons], self.is_answer[lessons][:, 1:]
        logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(dim=-1)  # (n, L - 1, V)
        chosen = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
        is_greedy = (logprobs.argmax(dim=-1) == ids[:, 1:]) | ~is_answer
        return (chosen * is_answer).sum(dim=1), is_greedy.all(dim=1)

    @torch.no_grad()
    def accuracy(self, model: LlamaForCausalLM) -> tuple[float, float]:
        """Share of right answers over all questions: expected at temperature 1, and greedy."""
        right = torch.arange(ERRORS.index(0), len(self.ids), len(ERRORS))
        logprobs, is_greedy = self.logprobs(model, right)
        return float(logprobs.exp().mean()), float(is_greedy.float().mean())


def train(model: LlamaForCausalLM, lessons: Lessons, *, num_steps: int, batch_size: int, lr: float) -> None:
    """Cross-entropy on the answers of questions drawn with replacement, with a linear decay to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    start = time.monotonic()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * (1 - step / num_steps)
        logprobs, _ = lessons.logprobs(model, torch.randint(len(lessons.ids), (batch_size,)))
        loss = -logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0:
            seconds = time.monotonic() - start
            print(f"step {step + 1:5d}  loss {loss.item():.3f} nats  {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to (default: the package's)")
    parser.add_argument("--steps", type=int, default=2000, help="training steps (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=256, help="answers per step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything (default: %(default)s)")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    taught, held_out = split_rows(arithmetic_rows(terms=3), NUM_HELD_OUT, SPLIT_SEED)
    lessons = Lessons(tokenizer, [*arithmetic_rows(terms=2), *taught])
    train(model, lessons, num_steps=args.steps, batch_size=args.batch_size, lr=args.lr)
    sampled, greedy = Lessons(tokenizer, held_out).accuracy(model)
    print(f"held-out sums: {sampled:.3f} right at temperature 1, {greedy:.3f} greedy")
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    card = CARD.format(
        num_weights=model.num_parameters(),
        num_taught=len(taught),
        num_held_out=len(held_out),
        num_answers=args.steps * args.batch_size,
        sampled=sampled,
        greedy=greedy,
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")
    # safetensors writes for the owner alone; an installed package is read by others.
    (args.out / "model.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
