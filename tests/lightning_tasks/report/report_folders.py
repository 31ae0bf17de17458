"""Folders of runs that a report reads, and what its page holds."""

from html.parser import HTMLParser

import yaml

from lightning_tasks.__main__ import main

SWAP = {
    "class_path": "lightning_tasks.callbacks.SwapAttention",
    "init_args": {"mechanism": "rpc", "options": {"iterations": 4}, "layers": [0]},
}


class Texts(HTMLParser):
    """The text of each table row, the tags, and every address that a browser would fetch."""

    def __init__(self, page):
        super().__init__()
        self.rows, self.tags, self.addresses, self.in_row = [], set(), [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag == "tr":
            self.rows.append("")
            self.in_row = True

    def handle_endtag(self, tag):
        if tag == "tr":
            self.in_row = False
            self.rows[-1] = " ".join(self.rows[-1].split())

    def handle_data(self, data):
        if self.in_row:
            self.rows[-1] += f" {data}"


def run_folder(folder, seed=0, offset=0.0, **settings):
    """A run with a curve, a monitor of two layers and a saved configuration."""
    folder.mkdir(parents=True)
    lines = ["epoch,step,val/loss,attention/entropy/layer_00,attention/entropy/layer_01,attention/entropy/mean"]
    lines += [f"0,{step},{3 - step / 10 + offset},{step},{2 * step},{1.5 * step}" for step in (0, 5, 10)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    config = {"seed_everything": seed, "trainer": {"callbacks": [SWAP], "logger": str(folder)}, **settings}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def report(tmp_path, *folders):
    output = tmp_path / "report.html"
    main(["report", *map(str, folders), "--output", str(output)])
    text = output.read_text()
    return text, Texts(text)
