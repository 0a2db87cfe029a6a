"""config.json of an MTP modules folder. No torch: the command line and the node's handshake read it too."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ModelLoadError
from common.model.model_config import ATTENTION_TYPES, read_json

FORMAT_VERSION = 1
MODEL_TYPE = "baton_mtp"


@dataclass(frozen=True)
class MtpConfig:
    """What a modules folder says about itself.

    The modules belong to exactly one trunk: `trunk_digest` is `trunk_digest(folder)` of the checkpoint
    they were distilled from, and loading them onto another is refused.
    """

    num_modules: int  # N
    trunk_digest: str
    draft_vocab_size: int | None = None  # None = the whole vocabulary
    windows: tuple[int | None, ...] = ()  # attention window of each module; () = all full
    draft_head: bool = False  # the file has a head of its own; else the trunk's rows are used
    recipe: dict[str, Any] = field(default_factory=dict)  # how they were trained, for people
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.num_modules < 1:
            raise ModelLoadError(f"MTP config: num_modules is {self.num_modules}, expected at least 1")
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_modules)
        if len(self.windows) != self.num_modules:
            raise ModelLoadError(f"MTP config: {len(self.windows)} windows for {self.num_modules} modules")

    @classmethod
    def from_folder(cls, folder: str | Path) -> "MtpConfig":
        """Reads config.json of a modules folder; ModelLoadError says what is wrong with it."""
        return cls.from_json(read_json(Path(folder) / "config.json"))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "MtpConfig":
        """The configuration in `raw`."""
        if raw.get("model_type") != MODEL_TYPE:
            raise ModelLoadError(
                f"MTP config: model_type is {raw.get('model_type')!r}, expected {MODEL_TYPE!r}: "
                "is this a modules folder?"
            )
        if raw.get("format_version") != FORMAT_VERSION:
            raise ModelLoadError(
                f"MTP config: format_version {raw.get('format_version')!r} is not supported, "
                f"only {FORMAT_VERSION}"
            )
        recurrent = [str(kind) for kind in raw.get("layer_types") or () if kind not in ATTENTION_TYPES]
        if recurrent:
            raise ModelLoadError(
                f"MTP config: modules with {', '.join(recurrent)} layers are refused: re-prefilling a module "
                "would need its state of up to N positions back, and a state cannot be rewound; use attention"
            )
        try:
            return cls(
                num_modules=int(raw["num_modules"]),
                trunk_digest=str(raw["trunk_digest"]),
                draft_vocab_size=raw.get("draft_vocab_size"),
                windows=tuple(raw.get("windows", ())),
                draft_head=bool(raw.get("draft_head", False)),
                recipe=dict(raw.get("recipe", {})),
            )
        except KeyError as error:
            raise ModelLoadError(f"MTP config: {error.args[0]} is missing") from None

    def to_json(self) -> str:
        """The text of config.json."""
        return json.dumps({"model_type": MODEL_TYPE, **asdict(self)}, indent=2) + "\n"
