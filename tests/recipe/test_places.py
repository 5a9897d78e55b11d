"""recipe= takes files, and pinned addresses that are fetched once: from the web, from git and from the Hugging Face hub."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from drivetrain.cli.main import main
from drivetrain.config.compose import compose
from drivetrain.core.errors import UserError
from drivetrain.core.overrides import format_value, parse, redact
from drivetrain.launch.job import prepare
from drivetrain.recipe import addresses, cache, git, hub, places, web
from drivetrain.sweeps import grid
from tests.support.places import Site, answer, certificate_of_this_machine, git_host, redirect, repository, site

TEXT = b"description: from afar\ndefaults:\n  - override /model: mlp\noptimizer:\n  lr: 0.0625\n"
SHA256 = cache.sha256_of(TEXT)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "on_fetch", [])
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


def test_a_name_that_is_nowhere_says_what_there_is():
    with pytest.raises(UserError, match="recipe=fsat is not known: did you mean 'fast'"):
        places.find("fsat")


# --- the command line ---


@pytest.mark.parametrize(
    "address",
    [
        f"https://host.example:8443/a/x.yaml?v=1#sha256={SHA256}",
        f"http://[::1]:8080/x.yaml#sha256={SHA256}",
        f"hf://owner/repo@{COMMIT}/recipes/x.yaml",
        f"git+https://host.example/owner/repo@{COMMIT}#recipes/x.yaml",
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
        ("git+https://host/repo#x.yaml", "is not pinned"),
        ("git+https://host/repo@v1.0#x.yaml", "is not pinned"),
        ("https://host/x.yaml#sha256=123", "is no SHA-256"),
        ("https://host/x.yaml#md5=123", "what follows '#' is not sha256=HASH"),
        ("hf://x.yaml", "the form is hf://OWNER/REPO@COMMIT/FILE.yaml"),
        (f"git+https://host/repo@{COMMIT}", "it names no file of the repository"),
        (f"git+https://host/repo@{COMMIT}#../x.yaml", "it names no file of the repository"),
        (f"git+http://host/repo@{COMMIT}#x.yaml", "plain http"),
        ("http://host/x.yaml", "plain http"),
        (f"https://me:secret@host/x.yaml#sha256={SHA256}", "a user's name and password"),
        (f"https://host:port/x.yaml#sha256={SHA256}", "it is no URL"),
        (f"https://ho st/x.yaml#sha256={SHA256}", "characters that no URL has"),
        ("ftp://host/x.yaml", "recipes are not fetched by ftp://"),
        ("file:///etc/passwd", "recipes are not fetched by file://"),
        (f"git+ssh://host/repo@{COMMIT}#x.yaml", "recipes are not fetched by git+ssh://"),
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
            addresses.parse(address)
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


def test_a_kept_file_that_was_changed_is_fetched_again(pinned, host):
    path = places.find(pinned)
    path.write_bytes(TEXT.replace(b"0.0625", b"9.9"))
    assert places.read(pinned).values["optimizer.lr"] == 0.0625
    assert len(host.asked) == 2


def test_it_is_shown_once(host, capsys):
    text = TEXT + b"# as sent\n"
    address = f"{host.has('/mine.yaml', text)}#sha256={cache.sha256_of(text)}"
    assert main(["recipe", "check", address]) == 0
    shown = capsys.readouterr().err
    assert f"fetched {address} from 127.0.0.1, {len(text)} bytes:" in shown
    assert "  lr: 0.0625" in shown
    assert main(["recipe", "check", address]) == 0
    assert capsys.readouterr().err == ""


def test_what_is_shown_cannot_steer_the_terminal(host, capsys):
    text = TEXT + "# \u202e gone\n".encode()
    assert main(["recipe", "check", f"{host.has('/mine.yaml', text)}#sha256={cache.sha256_of(text)}"]) == 2
    shown = capsys.readouterr().err
    assert "  lr: 0.0625" in shown
    assert "may not have the character U+202E" in shown
    assert "\u202e" not in shown


def test_every_job_of_a_sweep_reads_what_was_fetched_once(pinned, host, tiny):
    jobs = grid.prepare([*tiny(), f"recipe={pinned},fast"])
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


def test_a_redirect_to_plain_http_is_refused(monkeypatch):
    error = web.HTTPError("https://host/x", 302, "Found", {"Location": "http://127.0.0.1/x.yaml"}, None)  # type: ignore[arg-type]
    with pytest.raises(web.Refused, match=r"redirects to http://127\.0\.0\.1, and only https are followed"):
        web._next("https://host/x", error, ["host"])


def test_headers_go_to_their_own_host_alone(host):
    with site() as other:
        host.pages["/here"] = lambda request: redirect(request, "/near")
        host.pages["/near"] = lambda request: redirect(request, other.has("/there", TEXT))
        assert web.get(f"{host.url}/here", 1000, {"Authorization": "Bearer secret"}).content == TEXT
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
    host.pages["/mine.yaml"] = lambda request: (time.sleep(0.1), answer(request, TEXT))
    with ThreadPoolExecutor(4) as pool:  # a lock of a file excludes threads as it does processes
        assert len({*pool.map(places.find, [address] * 4)}) == 1
    assert len(host.asked) == 1


DRIPPED_TO_THE_END = []


def endless(request) -> None:
    redirect(request, request.path + "x")


def drip(request) -> None:
    request.send_response(200)
    request.end_headers()
    drip_headers(request)


def drip_headers(request) -> None:
    for _ in range(400):
        request.wfile.write(b"x")
        time.sleep(0.02)
    DRIPPED_TO_THE_END.append(request)


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
        (lambda request: redirect(request, "ftp://host/x"), "redirects to ftp://host, and only https and http"),
        (lambda request: request.wfile.write(b"what?\r\n\r\n"), "gave no answer that http knows"),
        (endless, "it redirects more than 5 times"),
        (drip, "it was not delivered within 0.3 s"),
        (drip_headers, "it was not delivered within 0.3 s"),
        (lambda request: time.sleep(1.5), "did not answer within 0.2 s"),
        (half, "127.0.0.1 ended the connection after 10 of 1000 bytes"),
        (large, "it is larger than 64 KiB"),
        (page, "it is a web page, not a recipe: name the file itself"),
    ],
)
def test_a_bad_server_gives_one_message(host, monkeypatch, does, says):
    monkeypatch.setattr(web, "TOTAL_S", 0.3)
    monkeypatch.setattr(web, "STEP_S", 0.2)
    host.pages["*"] = does
    assert says in problem(f"{host.url}/x.yaml#sha256={SHA256}")
    assert not DRIPPED_TO_THE_END
    assert not list((cache.folder()).glob("*.yaml"))


def test_no_network_gives_one_message_and_exit_code_2(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"https://127.0.0.1:{free.getsockname()[1]}/x.yaml#sha256={SHA256}"
        assert main(["train", f"recipe={address}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: recipe={address}: 127.0.0.1 cannot be reached: Connection refused"


def test_a_cache_that_cannot_be_written_gives_one_message(pinned, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set XDG_CACHE_HOME to one that can"):
        places.read(pinned)


def test_what_was_fetched_is_held_to_the_rules_of_every_recipe(host):
    text = b"trust: [evil]\nmodel:\n  _target_: evil.Net\n"
    with pytest.raises(UserError, match=r"\.yaml:1: a recipe cannot set 'trust'"):
        places.read(f"{host.has('/x.yaml', text)}#sha256={cache.sha256_of(text)}")


# --- git ---


@pytest.fixture
def repo(tmp_path: Path, host: Site) -> tuple[str, str]:
    """The address of a repository without its commit, and its commit."""
    commit = repository(tmp_path / "hosted" / "repo", {"recipes/mine.yaml": TEXT.decode(), "code.py": "raise SystemExit"})
    host.pages["*"] = git_host(tmp_path / "hosted")
    return f"git+{host.url}/repo/.git", commit


def test_one_file_of_one_commit_of_a_git_repository(repo, host, monkeypatch):
    """The user's hooks, templates and protocols have no say, and the second reading asks nobody."""
    base, commit = repo
    address = f"{base}@{commit}#recipes/mine.yaml"
    assert places.read(address).values["optimizer.lr"] == 0.0625
    asked = len(host.asked)
    monkeypatch.setattr(git, "_git", None)
    assert places.read(address).name == "mine"
    assert len(host.asked) == asked
    assert places.read(address).source.sha256 == SHA256


def test_a_branch_of_a_git_repository_is_pinned_by_fetch(repo, capsys):
    base, commit = repo
    assert main(["recipe", "fetch", f"{base}@main#recipes/mine.yaml"]) == 0
    assert f"{base}@{commit}#recipes/mine.yaml" in capsys.readouterr().out


def test_a_bad_repository_gives_one_message(repo, host, monkeypatch):
    base, commit = repo
    assert "the commit" in problem(f"{base}@{commit}#missing.yaml")
    assert "git: " in problem(f"{base}@{COMMIT}#recipes/mine.yaml")
    host.pages["*"], serve = lambda request: redirect(request, "/elsewhere"), host.pages["*"]
    assert "it redirects, which is not followed" in problem(f"{base}@{commit}#recipes/mine.yaml")
    host.pages["*"] = serve
    monkeypatch.setattr(git, "MAX_FETCHED", 10)
    assert "git fetches more than 0 MiB" in problem(f"{base}@{commit}#recipes/mine.yaml")


def test_a_git_host_that_drips_is_left(host, monkeypatch):
    monkeypatch.setattr(git, "TOTAL_S", 0.3)
    host.pages["*"] = drip
    assert "git did not deliver it within 0.3 s" in problem(f"git+{host.url}/repo@{COMMIT}#x.yaml")
    assert not DRIPPED_TO_THE_END


def test_git_runs_nothing_of_the_users(tmp_path, repo, monkeypatch):
    """Not even what the environment or a global config names."""
    base, commit = repo
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    trap.chmod(0o755)
    core = f"[core]\n hooksPath = {tmp_path}\n fsmonitor = {trap}\n askPass = {trap}\n"
    (tmp_path / ".gitconfig").write_text(f"{core}[init]\n templateDir = {tmp_path}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GIT_ASKPASS", "GIT_PROXY_COMMAND", "GIT_SSH_COMMAND", "GIT_EDITOR", "GIT_EXTERNAL_DIFF", "SSH_ASKPASS"):
        monkeypatch.setenv(name, str(trap))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert places.read(f"{base}@{commit}#recipes/mine.yaml").name == "mine"
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "elsewhere").exists()


# --- the hub ---


def test_a_file_of_the_hub(host, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_ENDPOINT", host.url)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    host.has(f"/owner/repo/resolve/{COMMIT}/recipes/mine.yaml", TEXT)
    host.has("/api/models/owner/repo/revision/main", json.dumps({"sha": COMMIT}).encode())
    assert places.read(f"hf://owner/repo@{COMMIT}/recipes/mine.yaml").values["optimizer.lr"] == 0.0625
    assert host.headers[0]["Authorization"] == "Bearer hf_mine"
    pinned, path = addresses.pin("hf://owner/repo@main/recipes/mine.yaml")
    assert (pinned, path.read_bytes()) == (f"hf://owner/repo@{COMMIT}/recipes/mine.yaml", TEXT)
    asked = len(host.asked)
    places.read(pinned)
    assert len(host.asked) == asked
    assert "another SHA-256" in problem(f"{pinned}#sha256={'0' * 64}")
    host.pages["*"] = lambda request: answer(request, b"", status=401)
    assert "needs `hf auth login` or HF_TOKEN" in problem(f"hf://owner/private@{COMMIT}/mine.yaml")


def test_a_data_set_and_a_branch_of_the_hub():
    assert hub.FORM.match("datasets/owner/re.po@v1/a/x.yaml").groups() == ("datasets", "owner/re.po", "v1", "a/x.yaml")
    assert hub.FORM.match("owner/repo/x.yaml").groups() == (None, "owner/repo", None, "x.yaml")


def test_the_hub_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'drivetrain\[hub\]'"):
        places.read(f"hf://owner/repo@{COMMIT}/x.yaml")


# --- every verb ---


def test_verbs_that_take_a_recipe_take_an_address(pinned, tmp_path, capsys):
    assert main(["recipe", "show", pinned]) == 0
    assert capsys.readouterr() == (TEXT.decode(), "")
    assert main(["recipe", "diff", pinned, "naive"]) == 0
    assert "optimizer.lr" in capsys.readouterr().out
    assert main(["recipe", "verify", pinned]) == 2
    assert "nothing claimed" in capsys.readouterr().err
    assert main(["show", f"recipe={pinned}", "data=synthetic", "epochs=1"]) == 0
    assert compose([f"recipe={pinned}"]).config.optimizer.lr == 0.0625
    assert main(["train", f"recipe={pinned}", "--cfg", "job", "-p", "optimizer.lr"]) == 0
    assert capsys.readouterr().out.strip().endswith("0.0625")
