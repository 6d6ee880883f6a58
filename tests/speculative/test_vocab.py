"""Which draft vocabularies fit a target, what is said of those that do not, and what is fed in between."""

import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.errors import UserError
from specsparse.speculative.drafters.sources import DraftWeights, VocabMap
from specsparse.speculative.vocab import check_compatible


class Vocabulary:
    def __init__(self, size=300, **fields):
        self.type, self.add_bos, self.add_eos, self.vocab_size = "spm", True, False, size
        self.bos_id, self.eos_id, self.odd = 1, 2, {}
        self.__dict__.update(fields)

    def token_text(self, index):
        return self.odd.get(index, f"t{index}")


TARGET = Vocabulary()


@pytest.mark.parametrize("draft", [Vocabulary(), Vocabulary(420), Vocabulary(200), Vocabulary(odd={1: "<s>", 4: "x"})])
def test_vocabularies_that_fit(draft):
    assert check_compatible(TARGET, draft) == []


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (Vocabulary(type="bpe"), ["tokenizer spm against bpe"]),
        (Vocabulary(429), ["size 300 against 429"]),
        (Vocabulary(odd={5: "x"}), ["token 5 't5' against 'x'"]),
        (Vocabulary(odd=dict.fromkeys(range(50, 60), "x")), ["token 50", "7 more"]),
        (Vocabulary(bos_id=0, odd={9: "x"}), ["token 9"]),
    ],
)
@pytest.mark.parametrize("special", [None, "target"])
def test_real_mismatches_are_refused(draft, words, special):
    with pytest.raises(UserError) as error:
        check_compatible(TARGET, draft, special_tokens=special, where="d.gguf")
    assert all(word in str(error.value) for word in ["d.gguf", "prompt_lookup", *words])
    assert "\n" not in str(error.value)


def test_the_known_llama_160m_file_goes_on_with_the_targets_specials():
    draft = Vocabulary(bos_id=0)
    with pytest.raises(UserError, match=r"BOS id 1 against 0.*special_tokens=target"):
        check_compatible(TARGET, draft)
    assert [d.what for d in check_compatible(TARGET, draft, special_tokens="target")] == ["BOS id"]


def test_ids_and_distributions_between_vocabularies():
    smaller = VocabMap(target=8, draft=6, columns=6, unknown=3)
    assert smaller.to_draft(jnp.array([0, 5, 6, 7, -7])).tolist() == [0, 5, 3, 3, 3]
    q = jnp.full((1, 6), 1 / 6, jnp.float32)
    wide = np.asarray(smaller.widen(DraftWeights(), q))
    assert wide.shape == (1, 8) and (wide[:, 6:] == 0).all() and (wide[:, :6] > 0).all()
    trimmed = DraftWeights(ids=jnp.array([1, 4]))
    two = VocabMap(target=8, draft=8, columns=2)
    assert np.asarray(two.widen(trimmed, jnp.array([[0.25, 0.75]]))).tolist() == [[0, 0.25, 0, 0, 0.75, 0, 0, 0]]
    assert two.token_ids(trimmed, jnp.array([1, 0])).tolist() == [4, 1]
