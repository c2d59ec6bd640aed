"""Give a decoder the interface by which lm-evaluation-harness calls models. This module imports the
harness, an optional dependency, so import it only where it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lsm_jax.data import Tokenizer
from lsm_jax.evaluation.gen_kwargs import parse_generation, replace_options
from lsm_jax.evaluation.generate import decode
from lsm_jax.evaluation.progress import EvaluationProgress
from lsm_jax.evaluation.reader import Reader
from lsm_jax.models import Decoder, sample

_SMALLEST = 32  # tokens; shorter windows are padded to it, so that few programs are compiled


class WindowScorer(Reader):
    """Compute how likely a model finds the ends of texts: for each window, a pair of tokens (context, end),
    the log-probability of the end, and whether each of its tokens is the most likely one."""

    def __init__(self, model: Decoder):
        super().__init__(model)

        def score(params, tokens, labels, scored, segment_ids):
            model = self._model(params)
            hidden, _, _ = model.hidden(tokens, segment_ids=segment_ids)
            rows, length = tokens.shape
            size = min(length, max(1, model.loss_chunk_size // rows))
            count = -(-length // size)

            def cut(x):  # [B, T, ...] -> [N, B, C, ...]
                x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
                return jnp.moveaxis(x.reshape(rows, count, size, *x.shape[2:]), 1, 0)

            def step(sums, chunk):
                x, wanted, counts = chunk
                logits = model.logits(x)
                wanted_logits = jnp.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]
                logprob = jnp.where(counts, wanted_logits - jax.nn.logsumexp(logits, axis=-1), 0)
                greedy = ~counts | (jnp.argmax(logits, axis=-1) == wanted)
                return (sums[0] + logprob.sum(axis=1), sums[1] & greedy.all(axis=1)), None

            start = (jnp.zeros(rows), jnp.ones(rows, bool))
            return jax.lax.scan(step, start, tuple(map(cut, (hidden, labels, scored))))[0]

        self._score = jax.jit(score)

    def __call__(
        self, windows: Sequence[tuple[list[int], list[int]]], rows: int, length: int
    ) -> list[tuple[float, bool]]:
        """Return for each window, a pair (context, end) of token lists: the log-probability of the end in
        nats given the context, and whether greedy decoding after the context returns the end.

        Args:
            windows: up to `rows` pairs of lists of token ids: the context, at least one token, and the end.
            rows: number of rows to which the batch is padded.
            length: number of tokens to which a context and its end, without the last token, are padded.
        """
        tokens, labels, segment_ids = (np.zeros((rows, length), np.int32) for _ in range(3))
        scored = np.zeros((rows, length), bool)
        for row, (before, end) in enumerate(windows):
            ids, place = np.array([*before, *end], np.int32), len(before) + len(end) - 1
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                raise ValueError(
                    f"a text has ids from {ids.min()} to {ids.max()}; the model's vocabulary has "
                    f"{self.vocab_size}: is this the tokenizer it was trained with?"
                )
            tokens[row, :place], labels[row, :place] = ids[:-1], ids[1:]
            segment_ids[row, :place], scored[row, len(before) - 1 : place] = 1, True
        arrays = (self._filled(x) for x in (tokens, labels, scored, segment_ids))
        with jax.set_mesh(self._mesh):
            scores = self._score(self._params, *jax.device_put(tuple(arrays), self._rows))
        logprob, greedy = (np.asarray(x)[: len(windows)] for x in scores)
        return [(float(p), bool(g)) for p, g in zip(logprob, greedy, strict=True)]


class _Settings(NamedTuple):
    """The sampling settings of a request of lm-evaluation-harness to generate text: number of tokens,
    temperature (0 is greedy), top_k and top_p. Requests with the same settings are batched together."""

    num_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None


class HarnessModel(TemplateLM):
    """The trained model as lm-evaluation-harness calls it, made by
    `lsm_jax.evaluation.harness.run_harness`.

    A text longer than `max_length` is cut on its left, as the harness's models do, and `notes` counts it. A
    prompt of a LongBench task is cut in its middle, as LongBench's code does. With `first_line`, an answer is
    the first line of the generated text, as in FoX's evaluation of LongBench. The token that the run put in front of documents is put in front of every window, including the windows
    of a long document's perplexity.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        max_gen_tokens: int,
        bos_id: int | None,
        batch_size: int,
        first_line: bool = False,
        gen_kwargs: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self._model, self._tokenizer, self._bos_id = model, tokenizer, bos_id
        self.max_length, self.max_gen_toks, self.batch_size = max_length, max_gen_tokens, batch_size
        self._scorer, self._cut, self._cut_middle = WindowScorer(model), 0, 0
        self._first_line, self._gen_kwargs = first_line, gen_kwargs or {}
        ends = (tokenizer.eos_id, tokenizer.bos_id, bos_id)
        self._end = next((token for token in ends if token is not None), None)
        if self._end is None:
            raise ValueError(
                f"tokenizer {tokenizer.name!r} has no token that begins or ends a document; lm_eval requires one"
            )

    def notes(self) -> list[str]:
        """Return lines for readers of the results which say how many texts were cut to the model's length."""
        notes = []
        if self._cut:
            notes.append(f"{self._cut} texts were cut on their left to {self.max_length} tokens")
        if self._cut_middle:
            notes.append(
                f"{self._cut_middle} prompts were cut in their middle, so that they and the answer have "
                f"{self.max_length} tokens"
            )
        return notes

    @property
    def eot_token_id(self) -> int:
        """The id of the token that ends a document or separates documents, at which generated text ends."""
        assert self._end is not None
        return self._end

    @property
    def prefix_token_id(self) -> int:
        """The id of the token that serves as context for a text without context."""
        return self.eot_token_id if self._bos_id is None else self._bos_id

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, by which the harness's cache distinguishes requests."""
        return self._tokenizer.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of a text, without BOS."""
        return list(self._tokenizer.encode(string))

    def _window(self, before: list[int], size: int, *, cut_middle: bool = False) -> list[int]:
        """Return the part of a text's tokens that the model reads as context: the last `size` tokens,
        including BOS as the first of them if the run put it in front of documents.

        With `cut_middle`, a longer text loses its middle instead: its first and last tokens remain, `size`
        in all. The text's tokens are `before`, with or without BOS.
        """
        bos = [] if self._bos_id is None else [self._bos_id]
        before = before[len(bos) :] if before[: len(bos)] == bos else before
        size = max(0, size - len(bos))
        if cut_middle and len(before) > size:
            self._cut_middle += 1
            half = size // 2
            return bos + before[: size - half] + before[len(before) - half :]
        last = before[max(0, len(before) - size) :]
        self._cut += len(last) < len(before)
        return bos + last

    def _scores(self, windows: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return for each window, a pair of token lists (context, end): the log-probability of the end in
        nats, and whether greedy decoding of the context returns the end. Results are in the order of
        `windows`; windows of similar lengths are computed together."""
        sizes = [len(before) + len(end) - 1 for before, end in windows]
        order = sorted(range(len(windows)), key=lambda i: -sizes[i])
        all_scores: list[Any] = [None] * len(windows)
        total = -(-len(windows) // self.batch_size)
        with EvaluationProgress("lm_eval: scoring", total) as bar:
            for first in range(0, len(order), self.batch_size):
                batch = order[first : first + self.batch_size]
                length = _filled_length(sizes[batch[0]])
                scores = self._scorer([windows[i] for i in batch], self.batch_size, length)
                for i, score in zip(batch, scores, strict=True):
                    all_scores[i] = score
                bar.advance(sum(sizes[i] for i in batch))
        return all_scores

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        windows = []
        for (_, text), before, end in requests:
            if not end:
                raise ValueError(f"lm_eval: the continuation {text!r} has no token")
            size = self.max_length + 1 - len(end)
            if size < 1:
                raise ValueError(
                    f"lm_eval.max_length={self.max_length}: a continuation has {len(end)} tokens"
                )
            windows.append((self._window(before, size), end))
        return self._scores(windows)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability in nats of each whole text, computed in windows of the model's length
        that predict disjoint sets of tokens."""
        windows, texts = [], []
        # BOS in front of each later window uses one of its tokens.
        size = self.max_length - (self._bos_id is not None)
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, size, 1):
                before, end = make_disjoint_window(pair)
                windows.append((self._window(before, self.max_length + 1 - len(end)), end))
                texts.append(index)
        sums = [0.0] * len(requests)
        for index, (logprob, _) in zip(texts, self._scores(windows), strict=True):
            sums[index] += logprob
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the model's continuation of each request's prompt, greedy unless a task samples, cut at
        the first of the task's `until` strings."""
        texts = [""] * len(requests)
        groups: dict[_Settings, list[tuple[int, list[int], list[str]]]] = {}
        for index, request in enumerate(requests):
            task = request.task_name or ""
            settings, prompt, until = self._parse_request(
                *request.args, cut_middle=task.startswith("longbench_")
            )
            groups.setdefault(settings, []).append((index, prompt, until))
        total = sum(-(-len(group) // self.batch_size) for group in groups.values())
        with EvaluationProgress("lm_eval: generating", total) as bar:
            for settings, group in groups.items():
                group.sort(key=lambda item: -len(item[1]))
                for first in range(0, len(group), self.batch_size):
                    batch = group[first : first + self.batch_size]
                    sampled = self._continue([prompt for _, prompt, _ in batch], settings, first)
                    for (index, _, until), ids in zip(batch, sampled, strict=False):
                        texts[index] = self._text(ids, until)
                    bar.advance(settings.num_tokens * len(batch))
        return texts

    def _parse_request(
        self, text: str, options: dict[str, Any], *, cut_middle: bool = False
    ) -> tuple[_Settings, list[int], list[str]]:
        """Parse one request of lm-evaluation-harness to generate text after the prompt `text`. Return the
        settings of sampling, the prompt's token ids (cut to the model's length), and the strings that end
        the continuation."""
        parsed = parse_generation(replace_options(options, self._gen_kwargs))
        number = self.max_gen_toks if parsed.num_tokens is None else parsed.num_tokens
        if not 1 <= number < self.max_length:
            raise ValueError(
                f"max_gen_toks={number}: accepted are 1 to {self.max_length - 1}, below lm_eval.max_length"
            )
        settings = _Settings(number, 0.0, None, None)
        if parsed.temperature > 0:
            settings = _Settings(number, parsed.temperature, parsed.top_k, parsed.top_p)
        prompt = self._window(
            self.tok_encode(text), self.max_length - number, cut_middle=cut_middle
        )
        return settings, prompt or [self.prefix_token_id], list(parsed.until)

    def _continue(self, prompts: list[list[int]], settings: _Settings, seed: int) -> np.ndarray:
        """Sample continuations of at most `batch_size` prompts, lists of token ids of which the first is
        the longest; return their token ids, int [batch_size, num_tokens]. Rows beyond the prompts are
        padding."""
        length = _filled_length(len(prompts[0]))
        tokens, not_padding = np.zeros((2, self.batch_size, length), np.int32)
        not_padding[len(prompts) :, -1] = 1
        for row, prompt in enumerate(prompts):
            tokens[row, -len(prompt) :], not_padding[row, -len(prompt) :] = prompt, 1
        return np.asarray(
            sample(
                self._model,
                jnp.asarray(tokens),
                num_tokens=settings.num_tokens,
                key=jax.random.key(seed),
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                stop_token=self._end,
                segment_ids=jnp.asarray(not_padding),
            )
        )

    def _text(self, ids: np.ndarray, until: list[str]) -> str:
        ended = np.flatnonzero(ids == self._end)
        text = decode(self._tokenizer, ids[: ended[0]] if ended.size else ids)
        places = [place for place in (text.find(end) for end in until if end) if place >= 0]
        text = text[: min(places)] if places else text
        return text.lstrip("\n").split("\n")[0] if self._first_line else text


def _filled_length(size: int) -> int:
    """Return the length to which prompts or windows of `size` tokens are padded: the smallest of 32, 48,
    64, 96, 128, ... (2^n and 3/2 * 2^n) that is at least `size`. So few lengths occur, and few programs are
    compiled."""
    length = _SMALLEST
    while length < size:
        length = length * 3 // 2 if length & (length - 1) == 0 else length // 3 * 4
    return length
