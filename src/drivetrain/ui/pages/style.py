"""The style sheet and the script that all pages share."""

from __future__ import annotations

# Texts have a contrast of at least 4.5 to 1 on their ground, lines of charts 3 to 1, in both colour schemes.
_LIGHT = """
  --ink: #1c2024; --soft: #5b5f67; --line: #d9d9e0; --ground: #fcfcfd; --raised: #f3f4f8; --mark: #3451b2;
  --good: #14693f; --bad: #b8242b; --win: #e3f3ea;
  --s0: #3e63dd; --s1: #b2550c; --s2: #18794e; --s3: #a32e86; --s4: #0b7285; --s5: #8a6d00; --s6: #ce2c31; --s7: #60646c;
"""
_DARK = """
  --ink: #edeef0; --soft: #b0b4ba; --line: #3b3f45; --ground: #111113; --raised: #1b1c20; --mark: #9eb1ff;
  --good: #3dd68c; --bad: #ff9592; --win: #12301f;
  --s0: #849dff; --s1: #f0984d; --s2: #3dd68c; --s3: #e58fd0; --s4: #4ccce6; --s5: #d9bd3f; --s6: #ff9592; --s7: #b0b4ba;
"""

STYLE = (
    f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
"""
    + """
* { box-sizing: border-box }
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  max-width: 1100px; margin: 0 auto; padding: 1.2rem
}
h1 { font-size: 1.35rem; line-height: 1.35; font-weight: 600; max-width: 60rem; margin: .2rem 0 .6rem; text-wrap: pretty }
h2 { font-size: 1.1rem; margin: 2rem 0 .4rem } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem }
h1, h2, h3, p, li, td.text, figcaption { overflow-wrap: anywhere }
p, li { max-width: 75ch } .soft { color: var(--soft) } a { color: var(--mark) }
.wide { /* it scrolls in itself; a shade at an edge says that there is more */
  overflow-x: auto; max-width: 100%; background:
    linear-gradient(to right, var(--ground) 1.5rem, transparent 3rem) local,
    linear-gradient(to left, var(--ground) 1.5rem, transparent 3rem) local,
    linear-gradient(to right, var(--line), transparent 1rem) scroll,
    linear-gradient(to left, var(--line), transparent 1rem) scroll
}
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid var(--line); vertical-align: baseline }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom } tbody th { font-weight: 400 }
tr > :first-child { text-align: left; padding-left: .3rem }
tbody th { white-space: normal; overflow-wrap: break-word; max-width: 24rem }
tbody th:has(a) { min-width: min(22rem, 45vw) }
td.text, th.text { text-align: left } td.text { white-space: normal; min-width: 14rem; max-width: 36rem }
th button { all: unset; cursor: pointer; text-align: inherit } th button:hover { text-decoration: underline }
button:focus-visible, .wide:focus-visible, summary:focus-visible, pre:focus-visible, input:focus-visible {
  outline: 2px solid var(--mark); outline-offset: 2px
}
th button::after { content: "\\2195"; padding-left: .25rem }
th[aria-sort=ascending] button::after { content: "\\2191" } th[aria-sort=descending] button::after { content: "\\2193" }
.winner { background: var(--win) } .winner th { font-weight: 600 } .winner > :first-child::before { content: "\\2605\\00a0" }
.PASS, .FAIL, .INCONCLUSIVE { font-weight: 600 } .PASS { color: var(--good) } .FAIL { color: var(--bad) }
.part { display: block; height: 3px; background: linear-gradient(var(--s0) 0 0) no-repeat right / var(--part) 100% }
code, pre { font: 13px/1.5 ui-monospace, monospace } pre, p code { overflow-wrap: anywhere }
pre { white-space: pre-wrap; padding: .6rem; border: 1px solid var(--line); background: var(--raised); margin: .4rem 0 }
.commands pre { display: flex; gap: .6rem; justify-content: space-between; align-items: start }
.commands pre + pre { margin-top: -.5rem }
[type=search] { font: inherit; color: var(--ink); background: var(--ground); border: 1px solid var(--line); border-radius: 3px;
  padding: .2rem .5rem; width: min(100%, 24rem) }
[type=search]::placeholder { color: var(--soft); opacity: 1 }
.commands button { font: 12px system-ui, sans-serif; color: var(--ink); background: var(--ground); border: 1px solid var(--line);
  border-radius: 3px; padding: .1rem .5rem; cursor: pointer; flex: none }
summary { cursor: pointer; margin: 1rem 0 .4rem }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)); gap: 1rem 1.2rem }
figure { margin: 0; max-width: 560px; position: relative } figcaption { font-weight: 500 }
svg { display: block; width: 100%; height: auto; overflow: visible }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft) }
.grid { stroke: var(--line); stroke-width: 1 } .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round }
.faint { stroke: var(--line); fill: none; stroke-width: 1.2 } circle.faint { fill: var(--line) }
.key { display: flex; flex-wrap: wrap; gap: .1rem .9rem; margin: .2rem 0; padding: 0; list-style: none; font-size: 13px }
.key li { display: flex; gap: .35rem; align-items: center; overflow-wrap: anywhere } .key svg { width: 22px; flex: none }
output { position: absolute; right: 0; top: 0; font-size: 12px; color: var(--ink); background: var(--raised); padding: 0 .4rem }
.over { white-space: nowrap } .over .charts { white-space: normal } .over label { margin-right: .7rem } """
    + "".join(
        f'.over input[value="{n}"]:checked ~ .charts figure[class^=over]:not(.over{n}) {{ display: none }}\n' for n in range(3)
    )
    + """.confusion td { text-align: center; background: color-mix(in srgb, var(--s0) calc(var(--share) * 38%), transparent) }
.confusion td, .confusion th { padding: .15rem .5rem; border: 1px solid var(--line) }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(120px, 1fr)); gap: .8rem; padding: 0; margin: .4rem 0;
  list-style: none
}
.tiles img { width: 96px; height: 96px; object-fit: contain; image-rendering: pixelated; display: block }
.tiles li { font-size: 13px; line-height: 1.35 } .right { color: var(--good) } .wrong { color: var(--bad) }
.ratio { width: 160px } td:has(.ratio) { text-align: center } .ratio .one { stroke: var(--soft); stroke-width: 1 }
.ratio g line { stroke-width: 3; stroke-linecap: round }
.faster line { stroke: var(--good) } .faster circle { fill: var(--good) } .slower line { stroke: var(--bad) }
.slower circle { fill: var(--bad) } .same line { stroke: var(--soft) } .same circle { fill: var(--soft) }
@media (min-width: 601px) { .narrow { display: none } }
@media (max-width: 600px) { .spare { display: none } thead th { white-space: normal } }
@media (max-width: 600px) { body { padding: .8rem } tbody th { max-width: 45vw } td, th { padding: .3rem .45rem } }
@media print {
  body { max-width: none; padding: 0; font-size: 11px } .wide { overflow: visible } table { white-space: normal }
  figure, tr, pre, .tiles li { break-inside: avoid } h2, h3 { break-after: avoid } th button::after { content: "" }
  .over label, input, .commands button { display: none } a { color: inherit }
}
"""
    + "".join(f".s{n} {{ stroke: var(--s{n}) }} .dot.s{n} {{ fill: var(--s{n}); stroke: none }}\n" for n in range(8))
    + "".join(f".d{n} {{ stroke-dasharray: {dash} }}\n" for n, dash in ((1, "6 3"), (2, "2 3"), (3, "8 3 2 3")))
)

# Sorts a table by a header's button, copies a command, shows a curve's value at the pointer. All else works without a script.
SCRIPT = """
for (const button of document.querySelectorAll('th button')) button.onclick = () => {
  const head = button.closest('th'), body = head.closest('table').tBodies[0], at = head.cellIndex;
  const down = head.ariaSort == 'ascending';
  for (const other of head.parentNode.cells) if (other.ariaSort) other.ariaSort = 'none';
  head.ariaSort = down ? 'descending' : 'ascending';
  const key = row => row.cells[at].textContent.trim(), number = text => parseFloat(text.replace(/,/g, ''));
  const order = (a, b) => isNaN(number(a)) || isNaN(number(b))
    ? isNaN(number(a)) - isNaN(number(b)) || a.localeCompare(b) : number(a) - number(b);
  body.append(...[...body.rows].sort((a, b) => (down ? -1 : 1) * order(key(a), key(b))));
};
for (const table of document.querySelectorAll('table:has(th button)')) if (table.tBodies[0].rows.length > 3) {
  const field = document.createElement('input'), wide = table.parentNode;
  field.type = 'search'; field.placeholder = field.ariaLabel = 'show rows with these words';
  wide.parentNode.insertBefore(field, wide);
  field.oninput = () => { const words = field.value.toLowerCase().split(/\\s+/);
    for (const row of table.tBodies[0].rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word)); };
}
for (const box of document.querySelectorAll('.commands pre')) {
  const copy = box.appendChild(document.createElement('button'));
  copy.textContent = 'copy';
  copy.onclick = () => { getSelection().selectAllChildren(box.firstChild);
    copy.textContent = document.execCommand('copy') ? 'copied' : 'selected'; };
}
for (const chart of document.querySelectorAll('svg[data-x]')) {
  const shown = chart.parentNode.appendChild(document.createElement('output'));
  const scale = text => { const [low, high, from, to, log] = JSON.parse(text);
    return at => { const share = (at - from) / (to - from);
      return log ? low * (high / low) ** share : low + (high - low) * share; }; };
  const x = scale(chart.dataset.x), y = scale(chart.dataset.y), digits = value => +value.toPrecision(4);
  chart.onpointerleave = () => shown.textContent = '';
  chart.onpointermove = event => {
    const box = chart.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    const height = (event.clientY - box.top) / box.height * chart.viewBox.baseVal.height;
    const near = [...chart.querySelectorAll('.curve')].map(curve => [curve.dataset.name, [...curve.points].reduce((a, b) =>
      Math.abs(b.x - at) < Math.abs(a.x - at) ? b : a)]).sort((a, b) => Math.abs(a[1].y - height) - Math.abs(b[1].y - height));
    if (near.length)
      shown.textContent = digits(x(near[0][1].x)) + ': ' + near.slice(0, 3).map(([name, point]) =>
        (near.length > 1 ? name + ' ' : '') + digits(y(point.y))).join(' · ');
  };
}
"""
