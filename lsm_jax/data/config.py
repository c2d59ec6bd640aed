"""What a run reads: paths, tokenizer, row length, order."""

# No `from __future__ import annotations`: config flags read the fields' types as objects.
import dataclasses

PACKINGS = ("concat", "first_fit")
FORMATS = ("text", "alpaca")


@dataclasses.dataclass(kw_only=True)
class DataConfig:
    """Where the tokens come from and how they become rows.

    Attributes:
        path: a LongCrawl-format store (a zarr v2 array [documents, length]), a folder that holds
            `train.zarr` and `heldout.zarr`, or a text or JSONL file, or a folder of such files.
            Empty: the demo text, the running interpreter's own library.
        heldout_path: the same, for evaluation. Empty: the folder's `heldout.zarr`, or else
            `heldout_fraction` of `path`, which training then leaves out.
        heldout_fraction: part of the documents held out where no held-out path is known.
        tokenizer: "bytes", "gpt2", or the path of a `tokenizer.json`.
        sequence_length: tokens in a row.
        add_bos: stores: `labels = row`, `tokens` = the row moved right by one with BOS in front
            (LongCrawl64's rule). Text: BOS in front of each document. Without it the first token
            of a row or document is not predicted.
        bos_id: the BOS id; None takes the tokenizer's.
        json_escape: text is JSON-escaped before it is tokenised, as LongCrawl64's was.
        separate_documents: stores only: a BOS inside a row begins a new segment, for rows that
            the writer packed. Batches then carry `segment_ids` and `positions`.
        packing: text only: "concat" fills every row and cuts documents at row ends; "first_fit"
            keeps a document that fits in a row whole and pads.
        align_documents: text only: every piece of a document begins at a multiple of it in its
            row, padding between; it divides `sequence_length`. Online-learned memories (TTT,
            Titans) read a row fastest where their mini-batch divides it; what they compute does
            not depend on it.
        predict_end: text only: a document's last token predicts BOS, the end of a document.
        text_key: the field of a JSONL line that holds the text.
        format: "text", or "alpaca": JSONL with instruction, input (or none) and output, put into
            the Stanford Alpaca prompt; only the output and the EOS after it are predicted.
        shuffle: seeded order, new each epoch. False: LongCrawl64's published order for a store
            (all documents' first block, then all their second, ...), listed order for text.
        shuffle_blocks: stores only: how many storage chunks are read and mixed at once. Memory
            is that many chunk columns of `sequence_length` (8 MiB each at 2048 x 2048).
        num_threads: threads that read or tokenise; 0 does the work in the calling thread.
        prefetch: batches made ahead of the one in use.
        cache_dir: where the demo store is kept. Empty: the user's cache folder.
    """

    path: str = ""
    heldout_path: str = ""
    heldout_fraction: float = 0.01
    tokenizer: str = "bytes"
    sequence_length: int = 2048
    add_bos: bool = True
    bos_id: int | None = None
    json_escape: bool = False
    separate_documents: bool = False
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
        """Checks the values; paths are looked at when an iterator is made.

        Raises:
            ValueError: names the field, what was given and what is accepted.
        """
        for name, least in (
            ("sequence_length", 1),
            ("align_documents", 1),
            ("shuffle_blocks", 1),
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
        if self.format not in FORMATS:
            raise ValueError(
                f"data.format={self.format!r}; accepted: {', '.join(map(repr, FORMATS))}"
            )
        if self.bos_id is not None and self.bos_id < 0:
            raise ValueError(f"data.bos_id={self.bos_id}; it must be a token id or None")
        if not self.tokenizer:
            raise ValueError(
                "data.tokenizer is empty; accepted: 'bytes', 'gpt2', or a tokenizer.json's path"
            )
        if not self.text_key:
            raise ValueError("data.text_key is empty; name the JSONL field that holds the text")
