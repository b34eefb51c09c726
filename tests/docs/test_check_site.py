"""The check of the built documentation finds what is broken, and nothing else."""

from pathlib import Path

import check_site
import pytest

ENTRY = '<div class="doc doc-object doc-{}"><h2 id="{}" class="doc doc-heading">x</h2></div>'


def site_of(folder: Path, body: str) -> dict[Path, check_site.Document]:
    (folder / "guides").mkdir()
    (folder / "guides" / "int8.html").write_text(f'<h2 id="modes"></h2><a href="../index.html#top">home</a>{body}')
    (folder / "index.html").write_text(
        '<h1 id="top"></h1><img src="plot.png"><a href="guides/int8.html#modes">int8</a>'
    )
    (folder / "plot.png").write_bytes(b"")
    return check_site.read(folder)


@pytest.mark.parametrize(
    ("reference", "fault"),
    [
        ("https://example.org/never-asked", ""),
        ("#modes", ""),
        ("../index.html?q=1#top", ""),
        ("gone.html", "gone.html leads nowhere"),
        ("../plots/plot.png", "../plots/plot.png leads nowhere"),
        ("../../outside.html", "../../outside.html leads nowhere"),
        ("#mode", "#mode: guides/int8.html has no element with that id"),
        ("../index.html#bottom", "index.html has no element with that id"),
    ],
)
def test_links(tmp_path: Path, reference: str, fault: str) -> None:
    pages = site_of(tmp_path, f'<a href="{reference}">there</a>')
    found = list(check_site.broken_links(tmp_path, pages))
    assert len(found) == bool(fault)
    assert all(fault in line for line in found)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("amp_kernels.sgd_(params, *, lr=0.1)", "function"),
        ("amp_kernels.optim.FusedSGD.master(self, param)", "function"),
        ("amp_kernels.nn.Linear(size)", "class"),
        ("amp_kernels.optim.FusedSGD: class", "class"),
        ("amp_kernels.Int8Tensor.shape: property", "attribute"),
        ("amp_kernels.testing.CASES: dict", "attribute"),
        ("amp_kernels.nn: module", "module"),
    ],
)
def test_every_name_has_the_entry_of_its_kind(tmp_path: Path, line: str, kind: str) -> None:
    name = line.partition(":")[0].partition("(")[0]
    others = {"function", "class", "attribute", "module"} - {kind, "class" if kind == "function" else "function"}
    assert list(check_site.missing_names([line], site_of(tmp_path / "", ENTRY.format(kind, name)))) == []
    for other in sorted(others):  # such as the module functional/matmul.py in place of the function
        page = check_site.Document(ENTRY.format(other, name))
        assert f"got the entry of a {other}" in "".join(check_site.missing_names([line], {tmp_path: page}))
    page = check_site.Document(f'<a id="{name}"></a>')
    assert "got no entry" in "".join(check_site.missing_names([line], {tmp_path: page}))


def test_a_site_without_pages_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_site.main(tmp_path) == 1
    assert "no entry" in capsys.readouterr().out
