"""How the page looks: one column, system fonts, light and dark.

Tables scroll inside their cards, with a shadow where columns are hidden; on a phone each line is a card of its own.
"""

STYLE = """
:root { --paper: #fbfbf9; --card: #ffffff; --ink: #1d1f21; --soft: #5c6166; --line: #dfe1e3; --shadow: #00000038;
  --near: #00694d; --far: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181a; --card: #1f2225; --ink: #e8e8e6; --soft: #a3a8ad; --line: #35393d; --shadow: #000000b0;
    --near: #58cfa8; --far: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 36px 20px 64px; }
main.broad { max-width: 1480px; }
header p { margin: 0; color: var(--soft); }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 2px; }
h2 { font-size: 1.15rem; margin: 40px 0 10px; }
h2.variant { font-size: 1.4rem; margin-top: 56px; padding-top: 18px; border-top: 2px solid var(--line); }
.index { margin: 18px 0 26px; padding-left: 20px; } a { color: inherit; }
.cards { display: grid; grid-template-columns: 3fr 2fr; gap: 16px; margin-top: 22px; }
@media (max-width: 760px) { .cards { grid-template-columns: 1fr; } }
.first { margin: 22px 0 14px; } .number { font-size: 1.2rem; font-weight: 600; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 20px; }
.card h2 { margin: 0 0 8px; }
.card p { margin: 0 0 6px; }
.card ul { margin: 0; padding-left: 18px; }
.card li { margin-bottom: 6px; }
.result { border-left: 5px solid var(--soft); font-size: 1.08rem; }
.result.near { border-left-color: var(--near); } .result.near h2 { color: var(--near); }
.result.far { border-left-color: var(--far); } .result.far h2 { color: var(--far); }
.wide, .picture { overflow-x: auto; border-radius: 10px;
  background: linear-gradient(90deg, var(--card) 40%, transparent) left / 56px 100% no-repeat local,
    linear-gradient(270deg, var(--card) 40%, transparent) right / 56px 100% no-repeat local,
    linear-gradient(90deg, var(--shadow), transparent) left / 18px 100% no-repeat scroll,
    linear-gradient(270deg, var(--shadow), transparent) right / 18px 100% no-repeat scroll, var(--card); }
.wide::-webkit-scrollbar, .picture::-webkit-scrollbar { height: 10px; }
.wide::-webkit-scrollbar-thumb, .picture::-webkit-scrollbar-thumb { background: var(--soft); border-radius: 5px; }
.hint { color: var(--soft); font-size: 0.88rem; margin: 0 0 8px; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
th, td { padding: 7px 6px; text-align: right; border-bottom: 1px solid var(--line); vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
thead th { font-weight: 600; color: var(--soft); line-height: 1.3; }
tbody th { font-weight: 500; min-width: 10em; }
th:first-child { position: sticky; left: 0; background: var(--card); }
tbody tr > * { vertical-align: top; }
td { white-space: nowrap; } td[data-label="verdict"] { white-space: normal; } .whole { white-space: nowrap; }
td small { display: block; color: var(--soft); font-size: 0.8rem; }
span.near { color: var(--near); font-weight: 600; } span.near::after { content: "\\00a0✓"; }
span.far { color: var(--far); font-weight: 600; } span.far::after { content: "\\00a0✗"; }
tr.noise th, tr.noise td { color: var(--soft); font-style: italic; border-bottom: none; }
.note { color: var(--soft); font-size: 0.88rem; margin: 8px 0 0; }
figure { margin: 0 0 18px; max-width: 1000px; }
.picture { border: 1px solid var(--line); padding: 14px; }
figure img { display: block; width: 100%; margin: 0 auto; }
figure.full { max-width: none; }
figure.narrow img { max-width: 740px; }
figcaption { color: var(--soft); font-size: 0.88rem; margin-top: 6px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 5px 20px; margin: 0; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
dl.small { font-size: 0.88rem; } dl.small dt { font-weight: 400; color: var(--soft); }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; }
@media (max-width: 760px) { .pair, dl { grid-template-columns: 1fr; } dl { gap: 0; } dd { margin-bottom: 8px; } }
@media (max-width: 900px) {
  .hint { display: none; } .wide { overflow-x: visible; }
  .wide table, .wide tbody, .wide tr, .wide tbody th { display: block; }
  .wide thead { display: none; }
  .wide tr { padding: 12px 0; border-bottom: 1px solid var(--line); } .wide tr:last-child { border-bottom: none; }
  .wide th, .wide td { border-bottom: none; padding: 2px 0; }
  .wide tbody th { font-weight: 600; }
  .wide td, .wide td:first-child { display: flex; justify-content: flex-end; align-items: baseline; gap: 10px;
    text-align: right; white-space: normal; min-width: 0; }
  .wide td small { white-space: nowrap; }
  .wide td::before { content: attr(data-label); margin-right: auto; color: var(--soft); text-align: left; }
  .picture img { min-width: 620px; } }
details { margin-top: 14px; } summary { cursor: pointer; color: var(--soft); }
"""
