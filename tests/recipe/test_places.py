"""recipe= takes files, and pinned addresses that are fetched once: from the web and from the Hugging Face hub."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from drivetrain.cli.main import main
from drivetrain.config.compose import compose
from drivetrain.core.errors import UserError
from drivetrain.core.options.overrides import format_value, parse, redact
from drivetrain.launch.job import prepare
from drivetrain.recipe import fetch, places
from drivetrain.sweeps import store
from tests.support.places import Site, answer, certificate_of_this_machine, redirect, site

TEXT = b"description: from afar\ndefaults:\n  - override /model: mlp\noptimizer:\n  lr: 0.0625\n"
SHA256 = fetch.sha256_of(TEXT)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "on_fetch", [])
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def host() -> Iterator[Site]:
    with site() as served:
        yield served


@pytest.fixture
def pinned(host: Site) -> str:
    return f"{host.has('/mine.yaml', TEXT)}#sha256={SHA256}"


def problem(address: str) -> str:
    """The one message that refuses an address."""
    with pytest.raises(UserError) as caught:
        places.read(address)
    (line,) = caught.value.problems
    assert line.startswith(f"recipe={address}")
    return line


# --- files ---


def test_a_name_is_a_recipe_that_ships_then_one_in_recipes_then_one_beside(tmp_path):
    for folder, lr in ((tmp_path, 0.5), (tmp_path / "recipes", 0.25)):
        folder.mkdir(exist_ok=True)
        for name in ("fast", "mine"):
            (folder / f"{name}.yaml").write_text(f"optimizer:\n  lr: {lr}\n")
    assert "optimizer.lr" not in places.read("fast").values or places.read("fast").values["optimizer.lr"] not in (0.25, 0.5)
    assert places.read("mine").values["optimizer.lr"] == 0.25
    assert places.read("./mine.yaml").values["optimizer.lr"] == 0.5
    (tmp_path / "recipes" / "mine.yaml").unlink()
    assert places.read("mine").values["optimizer.lr"] == 0.5


@pytest.mark.parametrize("words", [["recipe=mine"], ["-m", "recipe=mine", "optimizer.lr=0.1,0.2"]])
def test_a_recipe_is_read_once(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So a file that changes meanwhile is not two recipes, and an address is asked once."""
    from drivetrain.cli import train
    from drivetrain.measure.report import report
    from drivetrain.sweeps import store

    Path("recipes").mkdir(exist_ok=True)
    Path("recipes/mine.yaml").write_text("optimizer.lr: 0.25\n")
    read, found = places.load, []
    monkeypatch.setattr(places, "load", lambda name: found.append(name) or read(name))
    monkeypatch.setattr(train, "_run", lambda job, quiet: 0 if job.run.optimizer.lr == 0.25 else 1)
    monkeypatch.setattr(report, "sweep", lambda given, dirs, quiet: (store.prepare(given, dirs), 0))
    assert train.command(words) == 0
    assert found == ["mine"]


def test_a_name_that_is_nowhere_says_what_there_is():
    with pytest.raises(UserError, match=r"recipe=fsat is not known; .* did you mean 'fast'"):
        places.load("fsat")


# --- the command line ---


@pytest.mark.parametrize(
    "address",
    [
        f"https://host.example:8443/a/x.yaml?v=1#sha256={SHA256}",
        f"http://[::1]:8080/x.yaml#sha256={SHA256}",
        f"hf://owner/repo@{COMMIT}/recipes/x.yaml",
    ],
)
def test_an_address_needs_no_quotes(address):
    assert parse(f"recipe={address}").value() == address
    assert parse(f"recipe={format_value(address)}").value() == address
    words = [str(word) for word in parse(f"recipe={address},fast").sweep_string_iterator()]
    assert [word.strip("'") for word in words] == [address, "fast"]


def test_the_query_of_an_address_is_not_recorded():
    assert redact(f"recipe=https://host/x.yaml?token=hunter2#sha256={SHA256}") == (
        f"recipe=https://host/x.yaml?<redacted>#sha256={SHA256}"
    )


# --- pins ---


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("https://host/x.yaml", "is not pinned"),
        ("hf://owner/repo/x.yaml", "is not pinned"),
        ("hf://owner/repo@main/x.yaml", "is not pinned"),
        ("hf://owner/repo@0123456/x.yaml", "is not pinned"),
        ("https://host/x.yaml#sha256=123", "is not sha256=HASH"),
        (f"https://host/x.yaml#{SHA256}", "is not sha256=HASH"),
        ("https://host/x.yaml#", "is not sha256=HASH"),
        ("https://host/x.yaml#md5=123", "what follows '#' is not sha256=HASH"),
        ("hf://x.yaml", "hf://OWNER/REPO@COMMIT/FILE.yaml"),
        (f"git+https://host/repo@{COMMIT}#x.yaml", "a file of a commit has an https address"),
        (f"git+ssh://host/repo@{COMMIT}#x.yaml", "a file of a commit has an https address"),
        ("http://host/x.yaml", "it is not https"),
        (f"http://host/x.yaml#sha256={SHA256}", "it is not https"),
        (f"https://me:secret@host/x.yaml#sha256={SHA256}", "a user's name and password"),
        (f"https://host:port/x.yaml#sha256={SHA256}", "it is no URL"),
        (f"https://host:0/x.yaml#sha256={SHA256}", "it names no host"),
        (f"https://ho st/x.yaml#sha256={SHA256}", "characters that no URL has"),
        ("ftp://host/x.yaml", "recipes are not fetched from such an address"),
        ("file:///etc/passwd", "recipes are not fetched from such an address"),
        (f"ext::sh://host/repo@{COMMIT}#x.yaml", "recipe=ext::sh"),
    ],
)
def test_what_is_not_pinned_or_not_an_address_is_refused_without_a_connection(address, says, monkeypatch):
    monkeypatch.setattr(socket, "socket", None)
    if address.startswith("ext"):
        with pytest.raises(UserError, match="there is no such file"):
            places.read(address)
        return
    message = problem(address)
    assert says in message
    assert "is not pinned" not in says or f"`drivetrain recipe fetch {address}` shows" in message


def test_any_text_as_an_address_is_pinned_or_refused():
    """No other exception, whatever somebody types or pastes."""
    random, problems = Random(0), []
    parts = ["https://", "hf://", "git+https://", "host", "/", "@", "#", ":", "sha256=", "..", "[", "]", "%", "\x00", "é"]
    parts += [COMMIT, SHA256]
    for _ in range(2000):
        address = "".join(random.choices(parts[:3]) + random.choices(parts, k=random.randint(0, 8)))
        try:
            fetch.parse(address)
        except UserError as error:
            problems += error.problems
    assert len(problems) > 1000


def test_fetch_shows_a_recipe_and_prints_its_pinned_address(host, capsys):
    url = host.has("/mine.yaml", TEXT)
    assert main(["recipe", "fetch", url]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == f"drivetrain train 'recipe={url}#sha256={SHA256}'"
    assert "  lr: 0.0625" in printed.err
    assert places.read(f"{url}#sha256={SHA256}").name == "mine"
    assert len(host.asked) == 1


# --- the web ---


def test_what_was_fetched_is_kept_and_needs_no_network(pinned, host, monkeypatch):
    recipe = places.read(pinned)
    assert (recipe.name, recipe.values["optimizer.lr"], recipe.description) == ("mine", 0.0625, "from afar")
    monkeypatch.setattr(socket, "socket", None)
    assert places.read(pinned).values == recipe.values
    assert host.asked == ["/mine.yaml"]


def test_a_kept_file_that_was_changed_is_fetched_again(pinned, host, tmp_path):
    places.load(pinned)
    (path,) = (tmp_path / "cache/drivetrain/recipes").glob("*.yaml")
    path.write_bytes(TEXT.replace(b"0.0625", b"9.9"))
    assert places.read(pinned).values["optimizer.lr"] == 0.0625
    assert len(host.asked) == 2


@pytest.mark.parametrize("where", ["a relative folder", "a relative home", "a file", "another user's"])
def test_without_a_folder_of_ones_own_nothing_is_kept_or_read(where, pinned, host, tmp_path, monkeypatch):
    """A file that somebody planted in the working directory answered for an address, without a connection."""
    monkeypatch.chdir(tmp_path)
    if where == "a relative home":
        monkeypatch.setenv("HOME", ".")
    if where == "another user's":
        monkeypatch.setattr(fetch.os, "getuid", lambda: -1)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", {"a relative home": "", "a relative folder": "."}.get(where, str(tmp_path / "file")))
    (tmp_path / "file").touch()
    planted = [
        tmp_path / folder / f"{fetch.sha256_of(pinned.encode())}.yaml"
        for folder in (".cache/drivetrain/recipes", "drivetrain/recipes")
    ]
    for file in planted:
        file.parent.mkdir(parents=True)
        file.write_bytes(TEXT)
    before = {*tmp_path.rglob("*.yaml")}
    for _ in range(2):
        assert places.read(pinned).values["optimizer.lr"] == 0.0625
    assert len(host.asked) == 2
    assert {*tmp_path.rglob("*.yaml")} == before


def test_it_is_shown_once(host, capsys):
    text = TEXT + b"# as sent\n"
    address = f"{host.has('/mine.yaml', text)}#sha256={fetch.sha256_of(text)}"
    assert main(["recipe", "check", address]) == 0
    shown = capsys.readouterr().err
    assert f"fetched {address} from 127.0.0.1, {len(text)} bytes:" in shown
    assert "  lr: 0.0625" in shown
    assert main(["recipe", "check", address]) == 0
    assert capsys.readouterr().err == ""


def test_what_is_shown_cannot_steer_the_terminal(host, capsys):
    text = TEXT + "# \u202e gone\n".encode()
    assert main(["recipe", "check", f"{host.has('/mine.yaml', text)}#sha256={fetch.sha256_of(text)}"]) == 2
    shown = capsys.readouterr().err
    assert "  lr: 0.0625" in shown
    assert "may not have the character U+202E" in shown
    assert "\u202e" not in shown


def test_every_job_of_a_sweep_reads_what_was_fetched_once(pinned, host, tiny):
    jobs = store.prepare([*tiny(), f"recipe={pinned},fast"])
    names = [job.job.composed.recipe.name for job in jobs if job.job is not None]
    assert [job.label for job in jobs] == [f"recipe={pinned}", "recipe=fast"]
    assert names == ["mine", "fast"], [job.problems for job in jobs]
    assert len(host.asked) == 1


def test_a_run_records_where_its_recipe_came_from(pinned, host, tiny, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    prepare(tiny(f"recipe={pinned}", "runtime.device=cpu")).write_files(run_dir)
    recorded = json.loads((run_dir / "environment.json").read_text())
    assert recorded["recipe"] == {"given": pinned, "sha256": SHA256}
    prepare([f"resume={run_dir}"]).write_files(run_dir)
    assert json.loads((run_dir / "environment.json").read_text())["recipe"] == recorded["recipe"]
    assert len(host.asked) == 1


def test_redirects_are_followed_and_their_hosts_shown(host, capsys):
    with site() as other:
        host.pages["/mine.yaml"] = lambda request: redirect(
            request, other.has("/there.yaml", TEXT).replace("127.0.0.1", "localhost")
        )
        assert main(["recipe", "check", f"{host.url}/mine.yaml#sha256={SHA256}"]) == 0
    assert "from 127.0.0.1 → localhost" in capsys.readouterr().err


def test_a_redirect_to_plain_http_is_refused():
    with pytest.raises(
        fetch.Refused, match=r"redirects to an address that is not followed, http://127\.0\.0\.1/x\.yaml: it is not https"
    ):
        fetch._next("https://host/x", "http://127.0.0.1/x.yaml", "host")


@pytest.mark.parametrize(
    ("typed", "address", "kind"),
    [
        ("93.184.216.34", "127.0.0.1", "loopback"),
        ("93.184.216.34", "127.8.9.10", "loopback"),
        ("93.184.216.34", "::1", "loopback"),
        ("93.184.216.34", "::ffff:127.0.0.1", "loopback"),
        ("93.184.216.34", "169.254.169.254", "link-local"),
        ("93.184.216.34", "fe80::1%eth0", "link-local"),
        ("93.184.216.34", "10.0.0.1", "private"),
        ("93.184.216.34", "192.168.1.1", "private"),
        ("93.184.216.34", "fd00::1", "private"),
        ("93.184.216.34", "100.64.0.1", "private"),
        ("93.184.216.34", "0.0.0.0", "private"),
        ("10.0.0.1", "127.0.0.1", "loopback"),
        ("127.0.0.1", "169.254.169.254", "link-local"),
        ("127.0.0.1", "10.0.0.1", "private"),
        ("93.184.216.34", "1.1.1.1", None),
        ("10.0.0.1", "1.1.1.1", None),
        ("10.0.0.1", "192.168.1.1", None),
        ("127.0.0.1", "::1", None),
    ],
)
def test_a_redirect_to_an_address_of_another_kind_than_the_typed_one_is_refused(typed, address, kind):
    kinds = {"public"}
    fetch.check_kind(typed, "typed", kinds, True)
    if kind is None:
        return fetch.check_kind(address, "there", kinds, False)
    with pytest.raises(fetch.Refused, match=f"redirects to there, whose address {address} is {kind}"):
        fetch.check_kind(address, "there", kinds, False)


def test_a_redirect_inside_is_refused_before_it_is_asked(host, monkeypatch):
    """A name is resolved once, all its addresses are checked, and one of those is asked: DNS may answer differently later."""
    asked, real = [], socket.getaddrinfo

    def resolve(name, port=None, *args, **kwargs):
        asked.append(name)
        stands_for = {"localhost": ["127.0.0.1"], "metadata.example": ["127.0.0.1", "169.254.169.254"]}.get(name, [name])
        return [found for each in stands_for for found in real(each, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    there = host.has("/there", TEXT).replace("127.0.0.1", "localhost")
    host.pages["/here"] = lambda request: redirect(request, there)
    assert fetch.get(f"{host.url}/here").content == TEXT
    assert asked.count("localhost") == 1
    assert host.headers[1]["Host"] == there.split("/")[2]
    host.pages["/here"] = lambda request: redirect(request, "https://metadata.example/x.yaml")
    with pytest.raises(fetch.Refused, match=r"it redirects to metadata\.example, whose address 169\.254\.169\.254 is link-local"):
        fetch.get(f"{host.url}/here")


def test_headers_go_to_their_own_host_alone(host):
    with site() as other:
        host.pages["/here"] = lambda request: redirect(request, "/near")
        host.pages["/near"] = lambda request: redirect(request, other.has("/there", TEXT))
        assert fetch.get(f"{host.url}/here", {"Authorization": "Bearer secret"}).content == TEXT
        assert [headers.get("Authorization") for headers in host.headers] == ["Bearer secret"] * 2
        assert "Authorization" not in other.headers[0]


def test_https_with_a_good_and_a_bad_certificate(tmp_path, monkeypatch):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    file = certificate_of_this_machine(tmp_path / "host.pem")
    with site(file) as host:
        address = f"{host.has('/mine.yaml', TEXT)}#sha256={SHA256}"
        assert address.startswith("https://")
        assert "the certificate of 127.0.0.1 is not good: self-signed certificate" in problem(address)
        monkeypatch.setenv("SSL_CERT_FILE", f"{file}.crt")
        assert places.read(address).name == "mine"


def test_processes_that_need_it_at_once_fetch_it_once(host):
    """As ranks do that another launcher has started."""
    address = f"{host.url}/mine.yaml#sha256={SHA256}"
    host.pages["/mine.yaml"] = lambda request: answer(request, TEXT)
    with ThreadPoolExecutor(4) as pool:  # a lock of a file excludes threads as it does processes
        assert len({path for path, _ in pool.map(places.load, [address] * 4)}) == 1
    assert len(host.asked) == 1


def endless(request) -> None:
    redirect(request, request.path + "x")


GONE = threading.Event()  # ends the servers below, where the test is over


def drip(request) -> None:
    request.send_response(200)
    request.end_headers()
    drip_headers(request)


def drip_headers(request) -> None:
    while not GONE.wait(0.01):
        request.wfile.write(b"x")


def silent(request) -> None:
    GONE.wait()


def half(request) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    request.wfile.write(b"optimizer:")


def large(request) -> None:
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(b"#" * 64 * 1024)


def page(request) -> None:
    answer(request, b"\n<!DOCTYPE html><html>", "text/html")


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (lambda request: answer(request, TEXT + b"#"), "it has another SHA-256, "),
        (lambda request: answer(request, b"", status=404), "127.0.0.1 answered 404 Not Found"),
        (lambda request: answer(request, b"", status=500), "127.0.0.1 answered 500"),
        (lambda request: redirect(request, "file:///etc/passwd"), "redirects to an address that is not followed"),
        (lambda request: redirect(request, "//["), "Invalid IPv6 URL"),
        (lambda request: redirect(request, "ftp://host/x"), "ftp://host/x: it is not https"),
        (lambda request: redirect(request, ""), "it redirects more than 5 times"),
        (lambda request: request.wfile.write(b"what?\r\n\r\n"), "gave no whole answer"),
        (endless, "it redirects more than 5 times"),
        (drip, "it was not delivered within 0.3 s"),
        (drip_headers, "it was not delivered within 0.3 s"),
        (silent, "within 0.3 s"),
        (half, "gave no whole answer: IncompleteRead(10 bytes read, 990 more expected)"),
        (large, "it is larger than 64 KiB"),
        (page, "it is a web page, not a recipe: name the file itself"),
    ],
)
def test_a_bad_server_gives_one_message(host, monkeypatch, does, says, tmp_path):
    GONE.clear()
    if does in (drip, drip_headers, silent):  # none of which ends by itself, however long it is waited for
        monkeypatch.setattr(fetch, "TOTAL_S", 0.3)
    host.pages["*"] = does
    try:
        assert says in problem(f"{host.url}/x.yaml#sha256={SHA256}")
    finally:
        GONE.set()
    assert not list((tmp_path / "cache").rglob("*.yaml"))


def test_no_network_gives_one_message_and_exit_code_2(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"https://127.0.0.1:{free.getsockname()[1]}/x.yaml#sha256={SHA256}"
        assert main(["train", f"recipe={address}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: recipe={address}: 127.0.0.1 cannot be reached: Connection refused"


def test_what_was_fetched_is_held_to_the_rules_of_every_recipe(host):
    text = b"trust: [evil]\nmodel:\n  _target_: evil.Net\n"
    with pytest.raises(UserError, match=r"\.yaml:1: a recipe cannot set 'trust'"):
        places.read(f"{host.has('/x.yaml', text)}#sha256={fetch.sha256_of(text)}")


# --- the hub ---


def test_a_file_of_the_hub(host, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_ENDPOINT", host.url)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    host.has(f"/owner/repo/resolve/{COMMIT}/recipes/mine.yaml", TEXT)
    host.has("/api/models/owner/repo/revision/main", json.dumps({"id": "owner/repo", "sha": COMMIT}).encode(), "application/json")
    assert places.read(f"hf://owner/repo@{COMMIT}/recipes/mine.yaml").values["optimizer.lr"] == 0.0625
    assert host.headers[0]["Authorization"] == "Bearer hf_mine"
    pinned = fetch.pin("hf://owner/repo/recipes/mine.yaml")
    assert pinned == f"hf://owner/repo@{COMMIT}/recipes/mine.yaml#sha256={SHA256}"
    asked = len(host.asked)
    assert places.read(pinned).name == "mine"
    assert len(host.asked) == asked
    assert "another SHA-256" in problem(f"hf://owner/repo@{COMMIT}/recipes/mine.yaml#sha256={'0' * 64}")
    host.pages["*"] = lambda request: answer(request, b"", status=401)
    assert "needs `hf auth login` or HF_TOKEN" in problem(f"hf://owner/private@{COMMIT}/mine.yaml")
    with pytest.raises(UserError, match=r"the hub gave no commit: .*needs `hf auth login` or HF_TOKEN"):
        fetch.pin("hf://owner/private/mine.yaml")


def test_the_token_goes_to_no_host_that_the_hub_redirects_to(host, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", host.url)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    with site() as other:
        host.pages["*"] = lambda request: redirect(request, other.has("/large/file", TEXT))
        assert places.read(f"hf://datasets/owner/repo@{COMMIT}/mine.yaml").name == "mine"
        assert host.asked == [f"/datasets/owner/repo/resolve/{COMMIT}/mine.yaml"]
        assert (host.headers[0]["Authorization"], "Authorization" in other.headers[0]) == ("Bearer hf_mine", False)


@pytest.mark.parametrize(
    "content", [b'{"id": "a/b", "sha": "x trust=[posix]"}', b'{"id": "a/b", "sha": 1}', b"[" * 10_000, b"{}", b"null", b""]
)
def test_a_hub_that_names_no_commit_is_refused(content, host, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", host.url)
    host.pages["*"] = lambda request: answer(request, content, "application/json")
    with pytest.raises(UserError, match=r"the hub (did not say which commit|gave no commit)"):
        fetch.pin("hf://owner/repo/mine.yaml")


def test_a_hub_that_is_not_https_or_silent_is_refused(host, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example")
    assert "HF_ENDPOINT=http://hub.example: it is not https" in problem(f"hf://owner/repo@{COMMIT}/x.yaml")
    monkeypatch.setenv("HF_ENDPOINT", host.url)
    monkeypatch.setattr(fetch, "TOTAL_S", 0.3)
    GONE.clear()
    host.pages["*"] = silent
    try:
        with pytest.raises(UserError, match=r"within 0\.3 s"):
            fetch.pin("hf://owner/repo/mine.yaml")
    finally:
        GONE.set()


def test_the_hub_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'drivetrain\[hub\]'"):
        places.read(f"hf://owner/repo@{COMMIT}/x.yaml")


# --- every verb ---


def test_verbs_that_take_a_recipe_take_an_address(pinned, capsys, says, refused):
    assert main(["recipe", "show", pinned]) == 0
    assert capsys.readouterr() == (TEXT.decode(), "")
    assert "optimizer.lr" in says("recipe", "diff", pinned, "naive")
    assert "nothing claimed" in refused("recipe", "verify", pinned)
    assert main(["show", f"recipe={pinned}", "data=synthetic", "epochs=1"]) == 0
    assert compose([f"recipe={pinned}"]).plain["optimizer"]["lr"] == 0.0625
    assert says("train", f"recipe={pinned}", "--cfg", "job", "-p", "optimizer.lr").strip().endswith("0.0625")


def test_the_same_config_arrives_through_every_place(host, tmp_path, monkeypatch):
    """A run's recipe as a file, by its name, from the web and from the hub."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_ENDPOINT", host.url)
    (run_dir := tmp_path / "run").mkdir()
    job = prepare(["data=digits", "model=mlp", "precision=bf16", "optimizer.lr=0.03", "updates=12", "runtime.device=cpu"])
    job.write_files(run_dir)
    assert main(["recipe", "export", str(run_dir), "shared.yaml"]) == 0
    text = Path("shared.yaml").read_bytes()
    host.has(f"/me/recipes/resolve/{COMMIT}/shared.yaml", text)
    web = f"{host.has('/shared.yaml', text)}#sha256={fetch.sha256_of(text)}"
    for given in ("shared.yaml", "shared", web, f"hf://me/recipes@{COMMIT}/shared.yaml"):
        assert prepare([f"recipe={given}", "runtime.device=cpu"]).config_hash == job.config_hash
    assert prepare(["recipe=shared", "runtime.device=cpu", "optimizer.lr=0.04"]).config_hash != job.config_hash
