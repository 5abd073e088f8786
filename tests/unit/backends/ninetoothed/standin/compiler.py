"""No compiler: code for the GPU is made by Triton's own."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend


class NoCompiler(BaseBackend):  # type: ignore[misc]
    @staticmethod
    def supports_target(target: Any) -> bool:
        return False

    def hash(self) -> str:
        return ""

    def parse_options(self, options: dict[str, Any]) -> Any:
        raise NotImplementedError

    def add_stages(self, stages: Any, options: Any, language: Any = None) -> None:
        raise NotImplementedError

    def load_dialects(self, context: Any) -> None:
        raise NotImplementedError

    def get_module_map(self) -> dict[str, Any]:
        return {}
