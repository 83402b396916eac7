"""The style sheet of report.html: one palette for light pages, one for dark ones; series colours s0 to s7."""

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1c2128; --soft: #667080; --rule: #e3e6eb;
  --s0: #4c9be8; --s1: #e08a1e; --s2: #b5385f; --s3: #2a9d78; --s4: #7a5fd0; --s5: #8a9099; --s6: #b8860b;
  --s7: #34495e;
  --good: #1e8e5a; --fair: #b97a00; --poor: #c4342d; --none: #667080; }
@media (prefers-color-scheme: dark) { :root { --page: #12151a; --card: #1b2027; --ink: #e6e9ee; --soft: #98a2b0;
  --rule: #2f3640;
  --s0: #6cb4f5; --s1: #f0a94a; --s2: #ec6f93; --s3: #4fc79e; --s4: #a48ff0; --s5: #8a94a3; --s6: #d9b44a;
  --s7: #c7d2e0;
  --good: #4fc78a; --fair: #e8b04a; --poor: #f07a72; --none: #98a2b0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 24px; }
h1 { margin: 0 0 16px; font-size: 26px; } h2 { margin: 0 0 4px; font-size: 18px; }
small { color: var(--soft); font-weight: normal; font-size: 13px; } p { margin: 0 0 8px; color: var(--soft);
  font-size: 13px; }
section, .tile { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
section { padding: 18px 20px; margin-top: 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tile { padding: 12px 16px; } .tile span, .tile i { display: block; color: var(--soft); font-size: 13px;
  font-style: normal; }
.tile b { font-size: 24px; font-variant-numeric: tabular-nums; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 0 16px; }
.pair .charts { grid-template-columns: 1fr; } .pair .chart { max-width: none; } .pair .tick { font-size: 8px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(270px, 1fr)); gap: 8px 16px; }
figure { margin: 0; } figcaption { font-size: 13px; font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; margin-bottom: 6px; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; background: currentColor; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.chart { max-width: 480px; } .tick { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
.rule, .axis { stroke: var(--rule); stroke-width: 1; fill: none; }
.line { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.area { fill: currentColor; stroke: var(--card); stroke-width: .6; }
.s0 { color: var(--s0); } .s1 { color: var(--s1); } .s2 { color: var(--s2); } .s3 { color: var(--s3); }
.s4 { color: var(--s4); } .s5 { color: var(--s5); } .s6 { color: var(--s6); } .s7 { color: var(--s7); }
.good { color: var(--good); } .fair { color: var(--fair); } .poor { color: var(--poor); }
  .none { color: var(--none); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; }
  th, td { padding: 6px 14px 6px 0; text-align: left; }
.grid { width: 100%; font-variant-numeric: tabular-nums; } .grid th { color: var(--soft); font-weight: 600; }
.grid td { white-space: nowrap; min-width: 190px; border-top: 1px solid var(--rule); padding: 10px 24px 10px 0; }
  .grid tr > th:first-child { width: 90px; }
.track { max-width: 240px; } .track .gap { stroke: var(--soft); stroke-width: 3; opacity: .45; }
  .track .teacher { stroke: var(--ink); stroke-width: 2.5; }
.track .sft { fill: var(--card); stroke: var(--soft); stroke-width: 2; } .track .student { fill: currentColor; }
.track .error { stroke: currentColor; stroke-width: 1.5; fill: none; }
.balance { width: 100%; font-variant-numeric: tabular-nums; } .balance th { color: var(--soft); font-weight: 600; }
  .balance td { border-top: 1px solid var(--rule); }
.bars { width: 150px; color: var(--s0); } .bars path:not(.axis) { fill: currentColor; }
pre { overflow-x: auto; font-size: 13px; line-height: 1.45; }
details { margin-top: 8px; } summary { cursor: pointer; font-weight: 600; }
"""
