"""The models of the catalogue as choices of a config; a page of usage lists them, and needs nothing slower."""

from hydra.core.config_store import ConfigStore

from specsparse.models import catalogue


def offer_models() -> None:
    """Makes every name of the catalogue a choice of the `model` group, for Hydra's composition from here on.

    Raises:
        UserError: a file of the user's folder that is no entry.
    """
    store = ConfigStore.instance()
    for entry in catalogue.entries().values():
        for name in (entry.name, *entry.aliases):
            store.store(group="model", name=name, node={"defaults": ["custom", "_self_"], "path": entry.name})
    # Hydra copies its sources for every group that --help lists, and this one store with them; it is only read here.
    store.__deepcopy__ = lambda memo: store  # type: ignore[attr-defined]
