"""The report's page. Everything it shows is inside it: no script, no font, no file from elsewhere."""

from __future__ import annotations

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { --ink: #1d2733; --soft: #5d6b7a; --line: #dfe4ea; --paper: #f5f7f9; --accent: #14507a; --warn: #8a4b00; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
       font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main, header > div { max-width: 1080px; margin: 0 auto; padding: 0 24px; }
header { background: var(--accent); color: #fff; padding: 26px 0 22px; }
header h1 { margin: 0; font-size: 25px; font-weight: 600; overflow-wrap: anywhere; }
header p { margin: 4px 0 0; opacity: .85; font-size: 14px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 14px; margin: 22px 0 18px; }
.tile, section { background: #fff; border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 13px 16px; }
.tile b { display: block; font-size: 24px; font-weight: 600; line-height: 1.25; color: var(--accent); }
.tile span { color: var(--soft); font-size: 13px; }
section { padding: 18px 22px 20px; margin: 0 0 18px; }
h2 { margin: 0 0 8px; font-size: 18px; font-weight: 600; }
section > p { margin: 0 0 10px; max-width: 78ch; }
.lead { font-size: 16px; }
.note { color: var(--soft); font-size: 13.5px; }
.warn { color: var(--warn); margin: 4px 0; padding-left: 12px; border-left: 3px solid #e0a040; }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 18px; align-items: start; }
figure { margin: 0; }
figcaption { color: var(--soft); font-size: 13px; margin-top: 4px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td code { font: 13px/1.4 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: 13px; padding: 4px 0 34px; }
@media print { body { background: #fff; } section, .tile { break-inside: avoid; } }
</style>
</head>
<body>
<header><div><h1>{{ title }}</h1>{% if subtitle %}<p>{{ subtitle }}</p>{% endif %}</div></header>
<main>
{% if tiles %}<div class="tiles">
{% for value, label in tiles %}<div class="tile"><b>{{ value }}</b><span>{{ label }}</span></div>{% endfor %}
</div>{% endif %}
<section>
<h2>In short</h2>
<p class="lead">{{ summary }}</p>
{% for line in warnings %}<p class="warn">{{ line }}</p>{% endfor %}
</section>
{% if fsc_image %}<section>
<h2>Resolution</h2>
<div class="pair" style="grid-template-columns: minmax(320px, 3fr) minmax(250px, 2fr)">
<figure><img src="{{ fsc_image }}" alt="Fourier shell correlation"></figure>
<div>
<table><tr><th>FSC curve</th><th class="number">resolution at {{ criterion }}</th></tr>
{% for name, value in resolutions %}<tr><td>{{ name }}</td><td class="number">{{ value }}</td></tr>{% endfor %}</table>
<p class="note">{{ fsc_note }}</p>
</div></div>
</section>{% endif %}
{% if slices_image %}<section>
<h2>Maps</h2>
<p class="note">Central slices; grey values of each map run from its 0.5 to its 99.8 percentile. Half-maps and average are unfiltered.</p>
<img src="{{ slices_image }}" alt="Central slices of the maps">
</section>{% endif %}
{% if class_rows %}<section>
<h2>Classes</h2>
<div class="pair" style="grid-template-columns: minmax(320px, 3fr) minmax(250px, 2fr)">
{% if classes_image %}<figure><img src="{{ classes_image }}" alt="Fourier shell correlation of each class"></figure>{% endif %}
<div class="scroll"><table><tr><th>class</th><th class="number">share</th><th class="number">half 1</th><th class="number">half 2</th>
<th class="number">resolution at {{ criterion }}</th></tr>
{% for row in class_rows %}<tr><td>{{ row[0] }}</td>{% for cell in row[1:] %}<td class="number">{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</table></div></div>
{% if classes_slices %}<p class="note">Central slices of each class's filtered average. Classes need not stand in one frame.</p>
{% for image in classes_slices %}<img src="{{ image }}" alt="Central slices of the classes">{% endfor %}{% endif %}
</section>{% endif %}
{% if iterations_image %}<section>
<h2>Iterations</h2>
<img src="{{ iterations_image }}" alt="Resolution and angular increment per iteration">
{% if iteration_rows %}<div class="scroll"><table><tr>{% for name in iteration_columns %}<th class="number">{{ name }}</th>{% endfor %}</tr>
{% for row in iteration_rows %}<tr>{% for cell in row %}<td class="number">{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table></div>{% endif %}
</section>{% endif %}
{% if particle_images %}<section>
<h2>Particles</h2>
<div class="pair">{% for image, caption in particle_images %}
<figure><img src="{{ image }}" alt="{{ caption }}"><figcaption>{{ caption }}</figcaption></figure>{% endfor %}</div>
</section>{% endif %}
{% if noise_rows %}<section>
<h2>Noise</h2>
<p class="note">Fitted in each half-set for each group: its variance follows (weight + epsilon)<sup>exponent</sup>. Level: of the variance,
relative to all groups. Gain: scale of the signal, relative to all groups, drawn to 1 where few particles leave it uncertain.</p>
<div class="scroll"><table><tr><th>group</th>
{% for half in (1, 2) %}<th class="number">half {{ half }}: exponent (epsilon)</th>
<th class="number">level</th><th class="number">gain</th>{% endfor %}</tr>
{% for row in noise_rows %}<tr><td>{{ row[0] }}</td>
{% for cell in row[1:] %}<td class="number">{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table></div>
</section>{% endif %}
{% if bad_particles %}<section>
<h2>Skipped particles</h2>
<p>{{ bad_total }} left out of search and averages.</p>
<div class="scroll"><table><tr><th>particle</th><th>reason</th></tr>
{% for name, reason in bad_particles %}<tr><td><code>{{ name }}</code></td><td>{{ reason }}</td></tr>{% endfor %}</table></div>
{% if bad_more %}<p class="note">and {{ bad_more }} more; the log names them all.</p>{% endif %}
</section>{% endif %}
{% if workers %}<section>
<h2>Throughput</h2>
<div class="scroll"><table>
<tr><th>worker</th><th>device</th><th class="number">particle passes</th><th class="number">busy seconds</th><th class="number">passes / s</th></tr>
{% for row in workers %}<tr><td>{{ row[0] }}</td><td>{{ row[1] }}</td>
{% for cell in row[2:] %}<td class="number">{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</table></div>
</section>{% endif %}
{% if files %}<section>
<h2>Files</h2>
<table>{% for name, what in files %}<tr><td><code>{{ name }}</code></td><td>{{ what }}</td></tr>{% endfor %}</table>
</section>{% endif %}
{% for heading, rows in tables %}<section>
<h2>{{ heading }}</h2>
<div class="scroll"><table>{% for name, value in rows %}<tr><th>{{ name }}</th><td><code>{{ value }}</code></td></tr>{% endfor %}</table></div>
</section>{% endfor %}
<footer>Written by numba-glocal {{ version }}. This page is one file and needs no network.</footer>
</main>
</body>
</html>
"""
