"""Which text the training sequences of a run contain: shares of the tokens and epochs, source by source."""

from typing import NamedTuple

from jaxlc.core.counts import count_text
from jaxlc.data.corpus import Corpus


class SourceShare(NamedTuple):
    """The part of a source in the first sequences of a run."""

    name: str  # "" for data.sources
    share: float  # fraction of the tokens, as set
    realized_share: float  # fraction of the tokens in those sequences
    num_tokens: int  # in those sequences, without padding
    num_epochs: float
    num_documents: int  # per epoch
    epoch_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.share:.2%} of the tokens, {self.realized_share:.2%} in this run;"
            f" {count_text(self.num_documents, 'document')}, {count_text(self.epoch_tokens, 'token')},"
            f" {self.num_epochs:.3g} epochs"
        )


def source_shares(corpus: Corpus, num_sequences: int) -> list[SourceShare]:
    """The sources of the first `num_sequences` training sequences."""
    num_tokens = corpus.num_tokens_of_first(num_sequences)
    total = max(1, sum(num_tokens.values()))
    return [
        SourceShare(
            name=source.name,
            share=source.share,
            realized_share=num_tokens[source.name] / total,
            num_tokens=num_tokens[source.name],
            num_epochs=num_tokens[source.name] / source.train.num_tokens,
            num_documents=source.train.num_documents,
            epoch_tokens=source.train.num_tokens,
        )
        for source in corpus.sources
    ]


def share_lines(corpus: Corpus, num_sequences: int) -> list[str]:
    """One line per source of a mixture, for the start of a run; none without a mixture."""
    return [f"source     {share}" for share in source_shares(corpus, num_sequences) if share.name]
