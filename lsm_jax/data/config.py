"""The data config of a run: where tokens come from, the tokenizer, the length of rows, and their order."""

# No `from __future__ import annotations`: config flags read the fields' types as objects.
import dataclasses

from lsm_jax.data.mixture import parse_mixture

PACKINGS = ("concat", "first_fit")
FORMATS = ("text", "alpaca")
ROW_REMAINDERS = ("skip", "overlap")


@dataclasses.dataclass(kw_only=True)
class DataConfig:
    """The data config of a run: where the tokens come from and how rows are made of them.

    Attributes:
        path: a LongCrawl-format store (a zarr v2 array [documents, length]), a folder with `train.zarr` and
            `heldout.zarr`, a text, JSON, JSONL or parquet file (text and JSON also in .gz and .zst), a folder of such files,
            a folder that the package `datasets` saved, or a data set of the Hugging Face hub as
            OWNER/NAME[/SUBSET][@REVISION][:SPLIT]. Empty: the demo text, which is the standard library of the running
            interpreter.
        mixture: several sources in place of `path`, as weights and paths in turn: "0.7 stores/web 0.3 stores/code". All are
            stores, or none is. A source's share of the rows is its weight, divided by the sum of weights and rounded to
            1/10,000. Paths with blanks are quoted as in a shell.
        heldout_path: path of the data for evaluation, of the same kinds as `path`. Empty: the
            `heldout.zarr` in the folder `path`; if there is none, a share `heldout_fraction` of the
            documents of `path`, on which training does not run. Of a mixture the held-out data of all sources, one after
            the other.
        heldout_fraction: share of the documents to hold out if there are no separate held-out data.
        heldout_first: text only: hold out the first so many documents, in listed order, in place of a share. 0 holds out
            the share. Liger's authors hold out the first 200 instructions.
        tokenizer: "bytes", "gpt2", the path of a `tokenizer.json` or `tiktoken.model`, the id of a model on the Hugging Face
            hub, OWNER/NAME[@REVISION], or "auto": the tokenizer with which the store of `path` was written, also its
            JSON-escaping; bytes for text.
        sequence_length: tokens in a row.
        add_bos: put a BOS in front. Stores: `labels = row`, and `tokens` is the row shifted right by one after a BOS
            (LongCrawl64's rule). Text: a BOS in front of each document. False: the first token of a row or document is
            not predicted.
        bos_id: the BOS id; None is the tokenizer's.
        json_escape: JSON-escape text before tokenising it, as LongCrawl64 does.
        separate_documents: stores only: a BOS inside a row begins a new segment, as in stores written with `--pack`.
            Batches then also have `segment_ids` and `positions`.
        row_remainder: stores only: how the end of a document is read if `sequence_length` does not divide the length of the
            store's documents. "skip" does not read it; "overlap" reads it by one more sequence, the document's last
            `sequence_length` tokens, in which the tokens that were read before have loss_mask 0.
        packing: text only: "concat" fills every row and cuts documents at the ends of rows; "first_fit" cuts only
            documents that are longer than a row, and pads rows.
        align_documents: text only: every piece of a document begins at a multiple of this number in its row, with
            padding before it. It divides `sequence_length`. Online-learned memories (TTT, Titans) are fastest if their
            mini-batch divides it; the results are the same.
        predict_end: text only: the last token of a document predicts BOS, which marks the end.
        text_key: name of the JSON field or parquet column that has the text.
        format: "text", or "alpaca": objects with instruction, optional input, and output, which are formatted with the
            Stanford Alpaca prompt; only the output and the EOS after it are predicted. They are the lines of a JSONL file
            or, as in the released alpaca_data_cleaned.json, the elements of one array in a .json file.
        shuffle: read in a seeded order that differs in each epoch. False: stores in LongCrawl64's published order (the
            first block of all documents, then the second block of all, ...), text in listed order.
        shuffle_blocks: stores only: number of storage chunks that are read and shuffled together. It requires memory for
            as many chunk columns of `sequence_length` (8 MiB each at 2048 x 2048).
        num_threads: threads that read or tokenise; 0 reads in the calling thread.
        prefetch: number of batches to make ahead of the one in use.
        cache_dir: folder of the demo store, and of the plain files that are written of compressed files, parquet files and
            data sets. Empty: the user's cache folder.
    """

    path: str = ""
    mixture: str = ""
    heldout_path: str = ""
    heldout_fraction: float = 0.01
    heldout_first: int = 0
    tokenizer: str = "auto"
    sequence_length: int = 2048
    add_bos: bool = True
    bos_id: int | None = None
    json_escape: bool = False
    separate_documents: bool = False
    row_remainder: str = "skip"
    packing: str = "concat"
    align_documents: int = 1
    predict_end: bool = True
    text_key: str = "text"
    format: str = "text"
    shuffle: bool = True
    shuffle_blocks: int = 8
    num_threads: int = 4
    prefetch: int = 4
    cache_dir: str = ""

    def validate(self) -> None:
        """Check the values of the data config. Its paths are checked later, when a batch iterator is made.

        Raises:
            ValueError: a value is not accepted; the message names the field, the value and what is accepted.
        """
        for name, least in (
            ("sequence_length", 1),
            ("align_documents", 1),
            ("shuffle_blocks", 1),
            ("heldout_first", 0),
            ("num_threads", 0),
            ("prefetch", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"data.{name}={getattr(self, name)}; it must be at least {least}")
        if not 0.0 <= self.heldout_fraction < 1.0:
            raise ValueError(f"data.heldout_fraction={self.heldout_fraction}; it must be in [0, 1)")
        if self.sequence_length % self.align_documents:
            raise ValueError(
                f"data.align_documents={self.align_documents} does not divide "
                f"data.sequence_length={self.sequence_length}"
            )
        if self.packing not in PACKINGS:
            raise ValueError(
                f"data.packing={self.packing!r}; accepted: {', '.join(map(repr, PACKINGS))}"
            )
        if self.row_remainder not in ROW_REMAINDERS:
            raise ValueError(
                f"data.row_remainder={self.row_remainder!r}; accepted: {', '.join(map(repr, ROW_REMAINDERS))}"
            )
        if self.format not in FORMATS:
            raise ValueError(
                f"data.format={self.format!r}; accepted: {', '.join(map(repr, FORMATS))}"
            )
        if self.bos_id is not None and self.bos_id < 0:
            raise ValueError(
                f"data.bos_id={self.bos_id}; accepted is a token id, at least 0, or None"
            )
        if not self.tokenizer:
            raise ValueError(
                "data.tokenizer is empty; accepted: 'auto', 'bytes', 'gpt2', the path of a tokenizer.json, or a model of the hub"
            )
        if not self.text_key:
            raise ValueError(
                "data.text_key is empty; accepted is the name of the JSONL field that has the text"
            )
        if self.mixture:
            if self.path:
                raise ValueError(
                    f"data.mixture={self.mixture!r} and data.path={self.path!r}; accepted is one of them"
                )
            parse_mixture(self.mixture)
