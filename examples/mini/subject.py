"""How `mini` is driven by kcoord's conformance suite."""

import os

import mini

import kcoord
from kcoord.testing import Subject, main


class Mini(Subject):
    def __init__(self):
        kcoord.install()
        mini.ARCH = os.environ.get("ARCH", mini.ARCH)
        self.count, self.pause = 0, lambda: None
        generate = mini.generate

        def counted(source):
            self.count += 1
            self.pause()
            return generate(source)

        mini.generate = counted

    def build(self, number):
        return mini.compile(f"kernel{number}", f"{number} + 1").code.encode()

    def refuse(self):
        mini.compile("broken", "1 +")

    def compiles(self):
        return self.count

    def before_each_compile(self, pause):
        self.pause = pause

    def change(self, name):
        if name == "flags":
            os.environ["MINI_FLAGS"] = "-O1"
        else:
            mini.ARCH = "sm_80"


if __name__ == "__main__":
    main(Mini)
