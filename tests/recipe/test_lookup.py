"""recipe= takes names, files, and pinned https addresses."""

import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from drivetrain.cli.main import main
from drivetrain.config.compose import compose
from drivetrain.core.errors import UserError, without_logins
from drivetrain.core.options.overrides import format_value, parse, redact
from drivetrain.launch.job import prepare
from drivetrain.recipe import fetch, lookup
from drivetrain.sweeps import store
from tests.support.refusals import problems_of
from tests.support.web_site import Site, answer, certificate_of_this_machine, redirect, site

TEXT = b"description: from afar\ndefaults:\n  - override /model: mlp\noptimizer:\n  lr: 0.0625\n"
SHA256 = fetch.sha256_of(TEXT)


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch.fetched.cache_clear()
    monkeypatch.setattr(fetch, "on_fetch", [])
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    return certificate_of_this_machine(tmp_path_factory.mktemp("tls") / "host.pem")


@pytest.fixture
def host(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    with site(certificate) as served:
        yield served


@pytest.fixture
def pinned(host: Site) -> str:
    return f"{host.has('/mine.yaml', TEXT)}#sha256={SHA256}"


def problem(address: str) -> str:
    """The one message that refuses an address."""
    (line,) = problems_of(lookup.read, address)
    assert line.startswith(f"recipe={without_logins(address)}")
    return line


# --- files ---


def test_a_name_is_a_recipe_that_ships_then_one_in_recipes_then_one_beside(tmp_path):
    for folder, lr in ((tmp_path, 0.5), (tmp_path / "recipes", 0.25)):
        folder.mkdir(exist_ok=True)
        for name in ("fast", "mine"):
            (folder / f"{name}.yaml").write_text(f"optimizer:\n  lr: {lr}\n")
    assert "optimizer.lr" not in lookup.read("fast").values or lookup.read("fast").values["optimizer.lr"] not in (0.25, 0.5)
    assert lookup.read("mine").values["optimizer.lr"] == 0.25
    assert lookup.read("./mine.yaml").values["optimizer.lr"] == 0.5
    (tmp_path / "recipes" / "mine.yaml").unlink()
    assert lookup.read("mine").values["optimizer.lr"] == 0.5


@pytest.mark.parametrize("words", [["recipe=mine"], ["-m", "recipe=mine", "optimizer.lr=0.1,0.2"]])
def test_a_recipe_is_read_once(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So a file that changes meanwhile is not two recipes, and an address is asked once."""
    from drivetrain.cli import train
    from drivetrain.sweeps import driver, store

    Path("recipes").mkdir(exist_ok=True)
    Path("recipes/mine.yaml").write_text("optimizer.lr: 0.25\n")
    read, found = lookup.load, []
    monkeypatch.setattr(lookup, "load", lambda name: found.append(name) or read(name))
    monkeypatch.setattr(train, "_run", lambda job, quiet: 0 if job.run.optimizer.lr == 0.25 else 1)
    monkeypatch.setattr(driver, "run", lambda given, dirs, quiet: (Path("nothing"), 0 if store.prepare(given, dirs) else 1))
    assert train.command(words) == 0
    assert found == ["mine"]


def test_a_name_that_is_nowhere_says_what_there_is():
    with pytest.raises(UserError, match=r"recipe=fsat is not known; .* did you mean 'fast'"):
        lookup.load("fsat")


# --- the command line ---


@pytest.mark.parametrize(
    "address", [f"https://host.example:8443/a/x.yaml?v=1#sha256={SHA256}", f"https://[::1]/x.yaml#sha256={SHA256}"]
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
        ("https://host/x.yaml", "is not pinned, .*`curl -L 'https://host/x.yaml' | sha256sum` prints"),
        ("https://host/x.yaml#", "is not pinned"),
        ("https://host/x.yaml#sha256=123", "is not pinned"),
        (f"https://host/x.yaml#{SHA256}", "is not pinned"),
        ("https://host/x.yaml#md5=123", "is not pinned"),
        (f"hf://owner/repo/x.yaml#sha256={SHA256}", "sites call its raw form"),
        (f"git+https://host/repo#sha256={SHA256}", "sites call its raw form"),
        (f"http://host/x.yaml#sha256={SHA256}", "from https://HOST/FILE.yaml#sha256=HASH alone"),
        (f"https://me:secret@host/x.yaml#sha256={SHA256}", "without a user's name"),
        (f"https:///x.yaml#sha256={SHA256}", "cannot be fetched: .*no host"),
        (f"https://host:port/x.yaml#sha256={SHA256}", "cannot be fetched: nonnumeric port"),
        (f"https://[host/x.yaml#sha256={SHA256}", "cannot be fetched: Invalid IPv6 URL"),
        (f"https://ho st/x.yaml#sha256={SHA256}", "from https://HOST"),
        ("ftp://host/x.yaml", "from https://HOST"),
        ("file:///etc/passwd", "from https://HOST"),
    ],
)
def test_what_is_not_pinned_or_not_https_is_refused_without_a_connection(address, says, monkeypatch):
    monkeypatch.setattr(socket, "socket", None)
    assert re.search(says.replace("|", r"\|"), problem(address)), problem(address)


def test_any_text_as_an_address_is_refused_in_one_message(monkeypatch):
    """No other exception, whatever somebody types or pastes."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **_: [][0])
    random = Random(0)
    parts = ["https://", "hf://", "git+https://", "host", "/", "@", "#", ":", "sha256=", "..", "[", "]", "%", "\x00", "é", SHA256]
    for _ in range(500):
        address = "".join(random.choices(parts[:3]) + random.choices(parts, k=random.randint(0, 8)))
        with pytest.raises(UserError, match="recipe="):
            fetch.fetched(address)


# --- the web ---


def test_a_pinned_recipe_is_shown_and_read(pinned, host, capsys, says, refused):
    assert main(["recipe", "check", pinned]) == 0
    shown = capsys.readouterr().err
    assert f"fetched {pinned}, {len(TEXT)} bytes:" in shown
    assert "  lr: 0.0625" in shown
    recipe = lookup.read(pinned)
    assert (recipe.name, recipe.values["optimizer.lr"], recipe.description) == ("mine", 0.0625, "from afar")
    assert host.asked == ["/mine.yaml"], "a process asks once"
    fetch.fetched.cache_clear()
    assert main(["recipe", "show", pinned]) == 0
    assert capsys.readouterr() == (TEXT.decode(), "")
    assert "optimizer.lr" in says("recipe", "diff", pinned, "naive")
    assert "nothing claimed" in refused("recipe", "verify", pinned)
    assert compose([f"recipe={pinned}"]).plain["optimizer"]["lr"] == 0.0625


def test_what_is_shown_cannot_steer_the_terminal(host, capsys):
    text = TEXT + "# \u202e gone\n".encode()
    assert main(["recipe", "check", f"{host.has('/mine.yaml', text)}#sha256={fetch.sha256_of(text)}"]) == 2
    shown = capsys.readouterr().err
    assert "  lr: 0.0625" in shown
    assert "may not have the character U+202E" in shown
    assert "\u202e" not in shown


def test_every_job_of_a_sweep_reads_what_was_fetched_once(pinned, host, tiny):
    jobs = store.prepare([*tiny(), f"recipe={pinned},fast", "optimizer.lr=0.1,0.2"])
    assert [job.job.composed.recipe.name for job in jobs if job.job is not None] == ["mine", "mine", "fast", "fast"]
    assert len(host.asked) == 1


def test_a_run_records_where_its_recipe_came_from_and_is_resumed_without_it(pinned, host, tiny, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    job = prepare(tiny(f"recipe={pinned}", "runtime.device=cpu"))
    job.write_files(run_dir)
    recorded = json.loads((run_dir / "environment.json").read_text())
    assert recorded["recipe"] == {"given": pinned, "sha256": SHA256}
    fetch.fetched.cache_clear()
    again = prepare([f"resume={run_dir}"])
    again.write_files(run_dir)
    assert again.config_hash == job.config_hash
    assert json.loads((run_dir / "environment.json").read_text())["recipe"] == recorded["recipe"]
    assert len(host.asked) == 1


def test_a_redirect_is_followed_to_https_alone(host):
    host.has("/there.yaml", TEXT)
    host.pages["/mine.yaml"] = lambda request: redirect(request, "/there.yaml")
    assert lookup.read(f"{host.url}/mine.yaml#sha256={SHA256}").name == "mine"
    assert host.asked == ["/mine.yaml", "/there.yaml"]
    with site() as plain:
        to = plain.has("/there.yaml", TEXT)
        host.pages["/mine.yaml"] = lambda request: redirect(request, to)
        assert f"it redirects to {to}, which is not https" in problem(f"{host.url}/mine.yaml?2#sha256={SHA256}")
        assert plain.asked == []


def test_a_certificate_that_is_not_good_is_refused(pinned, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    assert "self-signed certificate" in problem(pinned)


def endless(request) -> None:
    redirect(request, request.path + "?x")


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


def large(request, status: int = 200) -> None:
    request.send_response(status)
    request.send_header("Location", "/there.yaml")
    request.end_headers()
    while not GONE.is_set():
        request.wfile.write(b"#" * 64 * 1024)


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (lambda request: answer(request, TEXT + b"#"), "has another SHA-256, "),
        (half, "has another SHA-256, "),
        (lambda request: answer(request, b"", status=404), "HTTP Error 404: Not Found"),
        (lambda request: answer(request, b"", status=500), "HTTP Error 500"),
        (lambda request: redirect(request, "file:///etc/passwd"), "it redirects to file:///etc/passwd, which is not https"),
        (lambda request: redirect(request, "//["), "Invalid IPv6 URL"),
        (lambda request: redirect(request, ""), "HTTP Error 302: Found"),
        (lambda request: request.wfile.write(b"what?\r\n\r\n"), "what?"),
        (endless, "it redirects more than 5 times"),
        (drip, "it was not delivered within 0.3 s"),
        (drip_headers, "it was not delivered within 0.3 s"),
        (silent, "it was not delivered within 0.3 s"),
        (large, "is larger than 64 KiB"),
        (lambda request: large(request, 302), "HTTP Error 404: Not Found"),
    ],
)
def test_a_bad_server_gives_one_message(host, monkeypatch, does, says):
    GONE.clear()
    if does in (drip, drip_headers, silent):  # none ends by itself, however long it is waited for
        monkeypatch.setattr(fetch, "MAX_S", 0.3)
    host.pages["/x.yaml"] = does
    try:
        assert says in problem(f"{host.url}/x.yaml#sha256={SHA256}")
    finally:
        GONE.set()


def test_no_network_gives_one_message_and_exit_code_2(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"https://127.0.0.1:{free.getsockname()[1]}/x.yaml#sha256={SHA256}"
        assert main(["train", f"recipe={address}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: recipe={address} cannot be fetched: <urlopen error [Errno 111] Connection refused>"


def test_what_was_fetched_is_held_to_the_rules_of_every_recipe(host):
    text = b"trust: [evil]\nmodel:\n  _target_: evil.Net\n"
    with pytest.raises(UserError, match=r"\.yaml:1: a recipe cannot set 'trust'"):
        lookup.read(f"{host.has('/x.yaml', text)}#sha256={fetch.sha256_of(text)}")
