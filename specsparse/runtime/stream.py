"""A text as it comes: an iterator over the pieces of one sequence."""

import itertools
from collections.abc import Iterator

from specsparse.engine.generate import Finish
from specsparse.engine.text.stopping import TokenText
from specsparse.runtime.results import Generation, generations, read_texts
from specsparse.runtime.session import Session
from specsparse.speculative.token_sources import PLAIN, TokenSource


class Stream(Iterator[str]):
    """Text pieces as they come; `generation` is set when the text has ended."""

    def __init__(self, session: Session, rounds: int):
        self._session, self._rounds = session, rounds
        self.generation: Generation | None = None
        self._groups = self._run()

    def __next__(self) -> str:
        while True:
            if text := "".join(piece for piece, _ in next(self._groups)):
                return text

    def marked(self) -> Iterator[tuple[str, TokenSource]]:
        """The same text token by token, each piece with where it came from."""
        return itertools.chain.from_iterable(self._groups)

    def tokens(self) -> Iterator[str]:
        """The same text token by token: one piece for each token that adds to it, also of an accepted draft."""
        return (piece for piece, _ in self.marked())

    def _run(self) -> Iterator[list[tuple[str, TokenSource]]]:
        """What may be shown after each few rounds."""
        session, params = self._session, self._session.sequences[0].params
        text = TokenText(session.model.tokenizer, params)
        while not text.ended:
            if session.finish[0] == Finish.RUNNING:
                session.advance(self._rounds)
            pieces = read_texts(session, {0: text})[0]
            first = pieces[0][0] if pieces else text.count
            token_sources = session.token_sources(first)
            if params.detokenize:
                yield [(piece, PLAIN if token_sources is None else token_sources[0][i - first]) for i, piece in pieces]
        self.generation = generations(session, {0: text})[0]
