"use strict";
// The page of `attnswap explore`. Text of anybody's goes through textContent alone; nothing is loaded from elsewhere.
(() => {
  const $ = (id) => document.getElementById(id);
  const { models, inputs, grids } = JSON.parse($("data").textContent);
  const MEAN = -1, ROLLOUT = -2; // in place of a head's number
  const POOL = 48, LEFT = 50, BOTTOM = 18; // pixels: of a whole map made small; beside and below a grid, for names
  const CLASS = ["class token"], STATISTICS = { entropy: "entropy", sink: "sink mass", logit: "largest logit" };
  const VIRIDIS = [[68, 1, 84], [72, 36, 117], [65, 68, 135], [53, 95, 141], [42, 120, 142], [33, 145, 140],
    [34, 168, 132], [68, 191, 112], [122, 209, 81], [189, 223, 38], [253, 231, 37]];
  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const state = { input: 0, layer: 0, head: 0, query: 0, key: 0, held: false, sort: "layer", way: 1 };
  const panels = []; // a model each; the last is the difference of two of them, where there are two
  let pictures = [];

  const make = (tag, parent, attributes = {}, text = null) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== null) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };
  const range = (count) => [...Array(count).keys()];
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const largest = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value) || 0), 0); // of NaN 0
  const shown = (value) => {
    if (!Number.isFinite(value)) return "–"; // null, too
    const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 0.1 ? 2 : null;
    return digits === null ? String(Number(value.toPrecision(2))) : value.toFixed(digits);
  };

  // ---- maps: bytes of the page, and rows and columns of them
  async function inflated(text) {
    const raw = atob(text), bytes = new Uint8Array(raw.length);
    for (let at = 0; at < raw.length; at++) bytes[at] = raw.charCodeAt(at);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  // What `packed` of collect.py made: the values of a row are low + step · code.
  function unpacked(model, bytes) {
    const alone = model.layers.find((layer) => !layer.cross);
    const layers = [...model.layers, ...(model.rollout ? [{ ...alone, heads: 1 }] : [])];
    const maps = layers.map((layer) => ({ ...layer, layer, rows: rowsOf(layer).length, pools: [] }));
    let start = 0;
    const part = (size) => maps.map((map) => bytes.subarray(start, (start += size(map))));
    const ends = part(({ heads }) => 8 * heads).map((each) => new Float32Array(each.slice().buffer));
    const halved = part(({ heads, rows }) => heads * rows), medians = part(({ heads, keys }) => heads * keys);
    const codes = part(({ heads, rows, keys }) => heads * rows * keys);
    maps.forEach((map, number) => {
      const { heads, rows, keys } = map, median = medians[number];
      map.codes = codes[number];
      map.low = Float32Array.from(range(heads * rows), (row) => ends[number][2 * Math.floor(row / rows)]);
      map.step = Float32Array.from(halved[number], (times, row) => (
        times === 255 ? NaN : ends[number][2 * Math.floor(row / rows) + 1] / 128 / 2 ** times));
      map.signed = map.low.some((value) => value < 0);
      for (let row = 0, at = 0; row < heads * rows; row++) {
        const first = Math.floor(row / rows) * keys;
        for (let key = 0; key < keys; key++) map.codes[at++] += median[first + key];
      }
    });
    return maps;
  }

  async function load(panel, input) {
    panel.loaded[input] ||= unpacked(panel.model, await inflated($(`maps-${panel.index}-${input}`).textContent));
  }

  // The map of a layer and head in a panel, with the heads whose mean it is; null where there is none.
  function place(panel, layer = state.layer, head = state.head) {
    if (panel.pair) {
      const [first, second] = panel.pair.map((each) => place(each, layer, head));
      const alike = first && second && ["rows", "keys"].every((name) => first.map[name] === second.map[name]) &&
        String(first.map.layer.rows) === String(second.map.layer.rows);
      return alike ? { ...second, minus: first } : null;
    }
    const last = panel.model.layers.length - 1;
    if (head === ROLLOUT && !(panel.model.rollout && layer === last)) return null;
    const map = panel.maps[head === ROLLOUT ? layer + 1 : layer];
    if (!map || layer > last || head >= map.heads) return null;
    return { map, heads: head === MEAN ? range(map.heads) : [Math.max(head, 0)] };
  }

  function summed({ map, heads, minus }, size, add, again) {
    const found = new Float32Array(size);
    for (const head of heads) add(found, map, head * map.rows, 1 / heads.length);
    if (minus) again(minus).forEach((value, at) => { found[at] -= value; });
    return found;
  }
  const rowOf = (of, row) => summed(of, of.map.keys, (found, { low, step, codes, keys }, first, share) => {
    const at = first + row, bottom = low[at] * share, factor = step[at] * share;
    for (let key = 0; key < keys; key++) found[key] += bottom + factor * codes[at * keys + key];
  }, (minus) => rowOf(minus, row));
  const columnOf = (of, key) => summed(of, of.map.rows, (found, { low, step, codes, keys, rows }, first, share) => {
    for (let row = 0; row < rows; row++) {
      found[row] += (low[first + row] + step[first + row] * codes[(first + row) * keys + key]) * share;
    }
  }, (minus) => columnOf(minus, key));

  // A whole map made small, each pixel the mean of its part.
  function pooled(of) {
    const { map } = of, height = Math.min(POOL, map.rows), width = Math.min(POOL, map.keys);
    const values = summed(of, height * width, (found, _, first, share) => {
      map.pools[first] ||= pooledHead(map, first, height, width);
      map.pools[first].forEach((value, at) => { found[at] += value * share; });
    }, (minus) => pooled(minus).values);
    return { values, width, height };
  }
  function pooledHead({ low, step, codes, keys, rows }, first, height, width) {
    const [values, counts] = [0, 0].map(() => new Float32Array(height * width));
    const columns = Uint16Array.from(range(keys), (key) => key * width / keys);
    for (let row = 0; row < rows; row++) {
      const at = first + row, line = Math.floor(row * height / rows) * width;
      for (let key = 0; key < keys; key++) {
        values[line + columns[key]] += low[at] + step[at] * codes[at * keys + key];
        counts[line + columns[key]]++;
      }
    }
    return values.map((value, at) => value / counts[at]);
  }

  // Half the sum of |difference| in a row, mean over the rows.
  function changed(pair, layer, head) {
    const of = place({ pair }, layer, head);
    if (!of) return null;
    const sums = range(of.map.rows).map((row) => rowOf(of, row).reduce((sum, value) => sum + Math.abs(value), 0));
    return sums.reduce((sum, value) => sum + value, 0) / 2 / of.map.rows;
  }

  function statistic(panel, name, layer, head) {
    if (panel.pair) {
      const [first, second] = panel.pair.map((each) => statistic(each, name, layer, head));
      return first === null || second === null ? null : second - first;
    }
    const of = panel.model.layers[layer]?.[name]?.[state.input];
    if (!of || head === ROLLOUT) return null;
    if (head !== MEAN) return of[head] ?? null;
    return of.includes(null) ? null : of.reduce((sum, value) => sum + value, 0) / of.length;
  }

  // ---- colors
  const box = $("root"), root = (share) => (box.checked ? Math.sqrt(share) : share);
  const poles = () => (dark.matches ? [[90, 170, 255], [255, 160, 70]] : [[33, 102, 172], [205, 90, 0]]);
  function color(share, signed) { // red, green, blue, opacity of a share from -1 to 1
    if (!Number.isFinite(share)) return [128, 128, 128, 0.25];
    const bright = root(clamp(Math.abs(share), 0, 1));
    if (signed) return [...poles()[share < 0 ? 0 : 1], bright];
    const at = bright * (VIRIDIS.length - 1), low = Math.min(Math.floor(at), VIRIDIS.length - 2);
    return [...VIRIDIS[low].map((part, of) => part + (at - low) * (VIRIDIS[low + 1][of] - part)), 1];
  }
  const css = ([red, green, blue, opacity]) => `rgba(${red | 0}, ${green | 0}, ${blue | 0}, ${opacity})`;

  const tables = {};
  function tableOf(signed) { // colors of shares from -1 to 1
    const id = `${signed} ${$("root").checked} ${dark.matches}`;
    return (tables[id] ||= range(513).map((at) => color((at - 256) / 256, signed)));
  }
  const scratch = document.createElement("canvas");
  function tile({ values, width, height }, most, signed, opacity = null) { // a picture with a pixel for each value
    scratch.width = width; scratch.height = height;
    const context = scratch.getContext("2d"), pixels = context.createImageData(width, height);
    const table = tableOf(signed), unknown = color(NaN), { data } = pixels;
    for (let at = 0; at < values.length; at++) {
      const share = clamp(values[at] / (most || 1), -1, 1);
      const found = Number.isNaN(share) ? unknown : table[Math.round(256 * share) + 256];
      for (let part = 0; part < 3; part++) data[4 * at + part] = found[part];
      data[4 * at + 3] = 255 * (opacity && !signed ? opacity(share) : (opacity ? 0.85 : 1) * found[3]);
    }
    context.putImageData(pixels, 0, 0);
    return scratch;
  }

  function scaleBar(parent) {
    const node = make("div", parent, { class: "bar", "aria-hidden": "true" });
    return ["span", "i", "span"].map((tag) => make(tag, node));
  }
  const shade = (share, signed) => [...poles()[signed && share > 0 ? 1 : 0], root(Math.abs(share))]; // behind a token
  function drawBar([low, strip, high], most, signed, colors = color) {
    const stops = range(13).map((at) => css(colors(signed ? at / 6 - 1 : at / 12, signed)));
    strip.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    low.textContent = signed ? shown(-most) : "0"; high.textContent = shown(most);
  }

  function contextOf(canvas, width, height) {
    const ratio = window.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio); context.imageSmoothingEnabled = false;
    return context;
  }
  function frame(context, box, ...lines) {
    for (const [width, stroke] of lines) {
      [context.lineWidth, context.strokeStyle] = [width, stroke]; context.strokeRect(...box);
    }
  }

  // ---- tokens: their names, and which of them is marked
  const lists = {}, counted = (word, count) => (lists[word + count] ||= range(count).map((at) => word + at));
  const gridOf = (count) => (inputs[state.input].image && grids[count]) || null; // tokens before it, rows, columns
  const countOf = (layer, ofKeys) => (ofKeys ? layer.keys : layer.queries);
  const rowsOf = (layer) => layer.rows || range(layer.queries);
  const current = () => (panels.map((panel) => place(panel)).find(Boolean) || place(panels[0], 0, 0)).map.layer;
  function namesOf(layer, ofKeys) {
    const list = inputs[state.input][layer.source || (ofKeys && layer.cross) ? "source" : "tokens"];
    return list && list.length === countOf(layer, ofKeys) ? list : null;
  }
  function tokenName(layer, ofKeys, at) {
    const list = namesOf(layer, ofKeys), grid = gridOf(countOf(layer, ofKeys)), patch = grid ? at - grid[0] : -1;
    if (list) return `“${list[at]}” (${at})`;
    if (patch < 0) return (grid && tokensBefore(grid[0])[at]) || `token ${at}`;
    return `patch ${Math.floor(patch / grid[2])},${patch % grid[2]}`;
  }
  const tokensBefore = (count) => (count === 1 ? CLASS : counted("token ", count)); // before patches
  const more = (panel, value) => (panel.pair && value > 0 ? "+" : "") + shown(value);
  function nearestRow(layer) { // that of the marked query, or of the nearest that is shown
    const rows = rowsOf(layer), away = rows.map((row) => Math.abs(row - state.query));
    return away.indexOf(Math.min(...away));
  }
  function byQuery(layer, values) { // values of the rows that are shown, at their queries
    if (!layer.rows) return values;
    const found = new Float32Array(layer.queries).fill(NaN);
    layer.rows.forEach((row, at) => { found[row] = values[at]; });
    return found;
  }
  function mark(ofKeys, at) {
    const layer = current();
    at = clamp(at, 0, countOf(layer, ofKeys) - 1);
    if (ofKeys || !layer.cross) state.key = at;
    if (!ofKeys || !layer.cross) state.query = at;
    draw(false);
  }
  function choose(layer, head) {
    const layers = Math.max(...models.map((model) => model.layers.length));
    state.layer = head === ROLLOUT ? layers - 1 : clamp(layer, 0, layers - 1); state.head = head;
    const of = current();
    state.query = clamp(state.query, 0, of.queries - 1);
    state.key = clamp(of.cross ? state.key : state.query, 0, of.keys - 1); draw();
  }

  // ---- a panel on the page
  function build(panel) {
    panel.node = make("article", $("panels"), { class: "panel" });
    panel.title = make("h2", panel.node);
    panel.caption = make("p", panel.node, { class: "caption" });
    panel.body = make("div", panel.node, { class: "body" });
    const left = make("div", panel.body, { class: "left" });
    panel.grid = make("canvas", make("div", left, { class: "scroll" }), { tabindex: 0, role: "application",
      "aria-roledescription": "grid of attention maps; arrow keys choose layer and head" });
    panel.grid.addEventListener("click", (event) => choose(...cellAt(panel, event)));
    panel.grid.addEventListener("pointermove", (event) => { panel.grid.title = said(panel, ...cellAt(panel, event)); });
    panel.grid.addEventListener("keydown", (event) => {
      if (!ARROWS[event.key]) return;
      event.preventDefault();
      const [across, down] = ARROWS[event.key], heads = gridHeads(), at = heads.indexOf(state.head) + down;
      choose(state.layer + across, heads[clamp(at, 0, heads.length - 1)]);
    });
    panel.gridBar = scaleBar(left);
    const views = make("div", panel.body, { class: "views" });
    panel.views = [buildView(views, true, "attends to"), buildView(views, false, "is attended by")];
    const whole = make("details", views, inputs[0].image ? {} : { open: "" });
    make("summary", whole, {}, "the whole map");
    panel.whole = make("canvas", whole, { class: "whole", role: "img" });
    whole.addEventListener("toggle", draw);
    listen(panel.whole, (event) => {
      const layer = current(), box = panel.whole.getBoundingClientRect(), rows = rowsOf(layer);
      state.query = rows[clamp(Math.floor((event.clientY - box.top) / box.height * rows.length), 0, rows.length - 1)];
      state.key = clamp(Math.floor((event.clientX - box.left) / box.width * layer.keys), 0, layer.keys - 1);
      draw();
    });
  }

  function listen(node, point) { // a pointer marks, a click holds what is marked or lets go
    node.addEventListener("pointermove", (event) => { if (!state.held) point(event); });
    node.addEventListener("click", (event) => { state.held = !state.held; point(event); });
  }

  function buildView(parent, ofKeys, text) {
    const figure = make("figure", parent), view = { ofKeys, text, figure, caption: make("figcaption", figure) };
    view.chips = make("div", figure, { class: "tokens" });
    view.canvas = make("canvas", figure, { tabindex: 0, role: "img" });
    view.list = make("div", figure, { class: "tokens list", tabindex: 0, role: "img" });
    view.bar = scaleBar(figure);
    view.top = make("p", figure, { class: "top" });
    for (const node of [view.chips, view.list]) {
      listen(node, ({ target }) => { if (target.dataset.at !== undefined) mark(ofKeys, Number(target.dataset.at)); });
    }
    listen(view.canvas, (event) => {
      const [before, rows, columns] = gridOf(countOf(current(), ofKeys)), box = view.canvas.getBoundingClientRect();
      const row = clamp(Math.floor((event.clientY - box.top) / box.height * rows), 0, rows - 1);
      const column = clamp(Math.floor((event.clientX - box.left) / box.width * columns), 0, columns - 1);
      mark(ofKeys, before + row * columns + column);
    });
    figure.addEventListener("keydown", (event) => {
      if (!ARROWS[event.key]) return;
      event.preventDefault();
      const [across, down] = ARROWS[event.key], line = gridOf(countOf(current(), ofKeys))?.[2] || 10;
      state.held = true;
      mark(ofKeys, (ofKeys ? state.key : state.query) + across + line * down);
    });
    return view;
  }

  const layersOf = (panel) => (panel.pair ? panel.pair[1] : panel).model.layers;
  const gridHeads = () => [...range(Math.max(...models.flatMap((model) => model.layers.map((layer) => layer.heads)))),
    MEAN, ...(models.some((model) => model.rollout) ? [ROLLOUT] : [])];
  const headName = (head) => (head === MEAN ? "mean of heads" : head === ROLLOUT ? "rollout" : `head ${head}`);
  function cellAt(panel, event) {
    const box = panel.grid.getBoundingClientRect(), heads = gridHeads(), { cell } = panel;
    const line = clamp(Math.floor((event.clientY - box.top) / cell), 0, heads.length - 1);
    return [clamp(Math.floor((event.clientX - box.left - LEFT) / cell), 0, layersOf(panel).length - 1), heads[line]];
  }
  function said(panel, layer, head) {
    const name = layersOf(panel)[layer]?.name, of = `layer ${layer}${name ? ` (${name})` : ""}, ${headName(head)}`;
    if (!place(panel, layer, head)) return `${of}: ${panel.pair ? "the maps have two sizes" : "not in this model"}`;
    const number = (each) => `${STATISTICS[each]} ${more(panel, statistic(panel, each, layer, head))}`;
    const numbers = Object.keys(STATISTICS).map(number);
    return (panel.pair ? "orange: more, blue: less; " : "") + (head === ROLLOUT ? of : [of, ...numbers].join(", "));
  }

  // ---- drawing
  function cellValues(panel, kind, layer, head) { // what a cell of a grid shows
    const of = place(panel, layer, head);
    if (!of) return null;
    if (kind in STATISTICS) {
      const value = statistic(panel, kind, layer, head);
      return value === null ? null : { values: [value], width: 1, height: 1 };
    }
    if (kind === "map") return pooled(of);
    const key = clamp(state.key, 0, of.map.keys - 1);
    const values = kind === "from" ? rowOf(of, nearestRow(of.map.layer)) : byQuery(of.map.layer, columnOf(of, key));
    const grid = gridOf(values.length);
    if (!grid) return { values, width: values.length, height: 1 };
    return { values: values.subarray(grid[0]), width: grid[2], height: grid[1] };
  }

  function drawGrids() {
    const kind = $("thumbs").value, heads = gridHeads();
    const cells = panels.map((panel) => heads.map((head) => (
      layersOf(panel).map((_, layer) => cellValues(panel, kind, layer, head)))));
    const most = cells.map((of) => Math.max(0, ...of.flat().map((each) => (each ? largest(each.values) : 0))));
    const shared = $("shared").checked, all = Math.max(...most.filter((_, at) => !panels[at].pair));
    panels.forEach((panel, at) => {
      const common = shared || panel.pair || kind in STATISTICS; // else each map has its own scale
      const scale = panel.pair ? Math.max(most[at], all / 16) : shared || kind in STATISTICS ? all : most[at];
      drawGrid(panel, heads, cells[at], common ? scale : null);
      panel.gridBar[0].parentNode.style.visibility = common ? "" : "hidden";
      if (common) drawBar(panel.gridBar, scale, signed(panel));
    });
  }
  function topOf(values, count) {
    const found = [];
    values.forEach((value, at) => {
      if (found.length === count && Math.abs(value) <= Math.abs(values[found[count - 1]])) return;
      const larger = found.findIndex((other) => Math.abs(value) > Math.abs(values[other]));
      const place = larger < 0 ? found.length : larger;
      if (Number.isFinite(value) && place < count) found.splice(place, 0, at);
      if (found.length > count) found.pop();
    });
    return found;
  }
  const signed = (panel) => Boolean(panel.pair) || panel.maps.some((map) => map.signed);

  function drawGrid(panel, heads, cells, scale) {
    const layers = layersOf(panel), style = getComputedStyle(document.body);
    const wide = (panel.body.clientWidth - LEFT) / layers.length, high = Math.max(400, window.innerHeight * 0.45);
    panel.cell = clamp(Math.floor(Math.min(wide, high / heads.length)), 16, 64);
    const { cell } = panel, size = cell - 2, bottom = heads.length * cell + BOTTOM / 2;
    const context = contextOf(panel.grid, LEFT + layers.length * cell, heads.length * cell + BOTTOM);
    cells.forEach((line, row) => line.forEach((each, layer) => {
      const box = [LEFT + layer * cell + 1, row * cell + 1, size, size];
      if (each) {
        context.imageSmoothingEnabled = each.width > 1.5 * size;
        context.drawImage(tile(each, scale ?? largest(each.values), signed(panel)), ...box);
      } else if (heads[row] !== ROLLOUT) {
        frame(context, box, [1, style.getPropertyValue("--line")]);
      }
      const chosen = layer === state.layer && heads[row] === state.head;
      if (chosen) frame(context, box, [3, style.getPropertyValue("--accent")]);
    }));
    context.font = `11px ${style.fontFamily}`;
    context.fillStyle = style.getPropertyValue("--soft");
    context.textBaseline = "middle";
    heads.forEach((head, row) => {
      const name = head === MEAN ? "mean" : headName(head);
      if (cell >= 18 || head < 0 || head % 2 === 0) context.fillText(name, 0, (row + 0.5) * cell);
    });
    context.textAlign = "center";
    context.fillText("layer", LEFT / 2, bottom);
    layers.forEach((_, layer) => {
      if (cell >= 20 || layer % 2 === 0) context.fillText(layer, LEFT + (layer + 0.5) * cell, bottom);
    });
    panel.grid.setAttribute("aria-label", `${panel.name}: ${said(panel, state.layer, state.head)}`);
  }

  function drawView(panel, of, view, values, most) {
    const { layer } = of.map, { ofKeys } = view, grid = gridOf(values.length), before = grid ? grid[0] : 0;
    const marked = clamp(ofKeys ? state.key : state.query, 0, values.length - 1);
    const names = grid ? counted("", 0) : namesOf(layer, ofKeys) || counted("", values.length);
    colorTokens(view.chips, tokensBefore(before), values, most, signed(panel), marked);
    const unseen = ofKeys || !layer.cross ? layer.unseen[state.input] : [];
    colorTokens(view.list, names, values, most, signed(panel), marked, unseen);
    [view.chips.hidden, view.canvas.hidden, view.list.hidden] = [!before, !grid, Boolean(grid)];
    if (grid) {
      const [, rows, columns] = grid, picture = pictures[state.input], width = clamp(view.figure.clientWidth, 80, 420);
      const height = Math.round(width * picture.naturalHeight / picture.naturalWidth), patch = marked - before;
      const context = contextOf(view.canvas, width, height), size = [width / columns, height / rows];
      const small = { values: values.subarray(before), width: columns, height: rows };
      const over = tile(small, most, signed(panel), (share) => 0.2 + 0.7 * root(Math.abs(share)));
      context.filter = panel.pair ? "grayscale(1)" : "none"; // two colors are those of the difference
      context.drawImage(picture, 0, 0, width, height);
      context.filter = "none"; context.drawImage(over, 0, 0, width, height);
      const box = [patch % columns * size[0], Math.floor(patch / columns) * size[1], ...size];
      if (patch >= 0) frame(context, box, [4, "#000"], [2, "#fff"]);
    }
    const named = (at) => `${tokenName(layer, ofKeys, at)} ${more(panel, values[at])}`;
    const top = topOf(values, 3).filter((at, of) => !of || Number(shown(values[at]))).map(named).join(" · ");
    const subject = tokenName(layer, !ofKeys, ofKeys ? rowsOf(layer)[nearestRow(layer)] : state.key);
    [view.top.textContent, view.caption.textContent] = [top, `${subject} ${view.text}`];
    (grid ? view.canvas : view.list).setAttribute("aria-label", `${panel.name}: ${subject} ${view.text} ${top}`);
    drawBar(view.bar, most, signed(panel), grid ? color : shade);
  }

  function colorTokens(node, texts, values, most, signed, marked, faint = []) {
    const theme = `${signed} ${dark.matches}`, unseen = new Set(faint), levels = texts.length > 1000 ? 8 : 24;
    const span = (text, at) => make("span", null, { "data-at": at }, text);
    if (node.texts !== texts) node.replaceChildren(...texts.map(span));
    if (node.texts !== texts || node.theme !== theme) Object.assign(node, { texts, theme, looks: [] });
    for (let at = 0; at < texts.length; at++) { // only what looks another way is written: there may be thousands
      const share = clamp(values[at] / (most || 1), -1, 1), level = Math.round(levels * root(Math.abs(share))) || 0;
      const kinds = [at === marked, unseen.has(at), Number.isNaN(share), level > 0.6 * levels, share < 0];
      const looks = kinds.reduce((sum, is) => 2 * sum + is, level);
      if (node.looks[at] === looks) continue;
      node.looks[at] = looks;
      node.children[at].className = ["marked", "unseen", "absent", "strong"].filter((_, of) => kinds[of]).join(" ");
      node.children[at].style.background = level ? css(shade(share, signed)) : "";
    }
  }

  function drawWhole(panel, of) {
    const { map } = of, width = clamp(panel.whole.parentNode.clientWidth, 100, 420);
    const height = Math.round(width * clamp(map.rows / map.keys, 0.25, 1));
    const context = contextOf(panel.whole, width, height);
    let small = pooled(of);
    if (map.rows * map.keys <= 1 << 18) {
      small = { values: new Float32Array(map.rows * map.keys), width: map.keys, height: map.rows };
      for (let row = 0; row < map.rows; row++) small.values.set(rowOf(of, row), row * map.keys);
    }
    context.imageSmoothingEnabled = small.width > 1.5 * width;
    const most = Math.max(largest(small.values), of.minus ? largest(pooled(of.minus).values) / 16 : 0);
    context.drawImage(tile(small, most, signed(panel)), 0, 0, width, height);
    frame(context, [0, nearestRow(map.layer) / map.rows * height, width, height / map.rows], [1, "#888"]);
    frame(context, [state.key / map.keys * width, 0, width / map.keys, height], [1, "#888"]);
    panel.whole.setAttribute("aria-label", `${panel.name}: a row for each query, a column for each key`);
  }

  let waiting = true, timer = 0, stale = true; // waiting until the first maps are there
  function draw(small = true) { // or first what a marked token changes, and small maps once the pointer rests
    stale ||= Boolean(small);
    if (!waiting) requestAnimationFrame(() => { waiting = false; drawNow(); });
    waiting = true;
  }
  function drawNow() {
    const small = stale;
    if (small) drawSmall();
    stale = false;
    const places = panels.map((panel) => place(panel)), values = places.map((of) => of && [
      rowOf(of, nearestRow(of.map.layer)),
      byQuery(of.map.layer, columnOf(of, clamp(state.key, 0, of.map.keys - 1))),
    ]);
    const patches = (each) => each.subarray(gridOf(each.length)?.[0] || 0);
    const most = values.map((pair) => pair && pair.map((each) => largest(patches(each))));
    const own = most.filter((pair, of) => pair && !panels[of].pair);
    const all = [0, 1].map((at) => Math.max(0, ...own.map((pair) => pair[at])));
    panels.forEach((panel, number) => {
      const of = places[number];
      [panel.title.textContent, panel.caption.textContent] = [panel.name, said(panel, state.layer, state.head)];
      panel.node.classList.toggle("empty", !of);
      if (!of) return;
      panel.views.forEach((view, at) => {
        const least = panel.pair ? all[at] / 16 : $("shared").checked ? all[at] : 0; // below, rounding shows
        drawView(panel, of, view, values[number][at], Math.max(most[number][at], least));
      });
    });
    for (const row of document.querySelectorAll("#table tbody tr")) {
      row.toggleAttribute("data-chosen", row.dataset.place === `${state.layer} ${state.head}`);
    }
    clearTimeout(timer);
    timer = setTimeout(() => {
      if (!small) drawSmall();
      $("said").textContent = sentence();
    }, 150);
  }
  function drawSmall() {
    drawGrids();
    for (const panel of panels) if (panel.whole.parentNode.open && place(panel)) drawWhole(panel, place(panel));
  }
  function sentence() {
    const marked = tokenName(current(), false, state.query), held = state.held ? " (held; Escape lets go)" : "";
    const of = (panel) => panel.views.map((view) => `${view.text} ${view.top.textContent}`).join("; ");
    const found = panels.filter((panel) => place(panel)).map((panel) => `${panel.name}: ${of(panel)}.`).join(" ");
    return `Layer ${state.layer}, ${headName(state.head)}, ${marked}${held}. ${found}`;
  }

  // ---- the table of heads
  function buildTable() {
    const own = panels.filter((panel) => !panel.pair), table = make("table"), head = make("thead", table);
    const columns = [{ id: "layer", value: (layer) => layer }, { id: "head", value: (_, head) => head }];
    const groups = make("tr", head), line = make("tr", head), body = make("tbody", table);
    make("td", groups, { colspan: 2 });
    own.forEach((panel, number) => {
      const add = (id, text, value) => columns.push({ id: `${id} ${number}`, text, value });
      for (const name in STATISTICS) add(name, STATISTICS[name], (...at) => statistic(panel, name, ...at));
      if (number) add("changed", "changed", (...at) => changed([own[0], panel], ...at));
      make("th", groups, { colspan: number ? 4 : 3, scope: "colgroup" }, panel.name);
    });
    const rows = range(Math.max(...own.map((panel) => panel.model.layers.length))).flatMap((layer) => {
      const heads = Math.max(...own.map((panel) => panel.model.layers[layer]?.heads || 0));
      return range(heads).map((of) => ({ layer, head: of, values: columns.map((column) => column.value(layer, of)) }));
    });
    for (const row of rows) {
      row.node = make("tr", null, { tabindex: 0, "data-place": `${row.layer} ${row.head}` });
      row.values.forEach((value, at) => make(at < 2 ? "th" : "td", row.node, {}, at < 2 ? value : shown(value)));
      row.node.addEventListener("click", () => choose(row.layer, row.head));
      row.node.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(row.layer, row.head); });
    }
    const sort = () => {
      const at = columns.findIndex((column) => column.id === state.sort);
      const order = (row) => (Number.isFinite(row.values[at]) ? state.way * row.values[at] : Infinity); // unknown: last
      rows.sort((one, other) => order(one) - order(other) || one.layer - other.layer || one.head - other.head);
      body.replaceChildren(...rows.map((row) => row.node));
      const way = state.way > 0 ? "ascending" : "descending";
      for (const column of columns) column.node.setAttribute("aria-sort", column.id === state.sort ? way : "none");
    };
    for (const column of columns) {
      column.node = make("th", line, { scope: "col" });
      make("button", column.node, { type: "button" }, column.text || column.id).addEventListener("click", () => {
        state.way = state.sort === column.id ? -state.way : column.text ? -1 : 1;
        state.sort = column.id;
        sort();
      });
    }
    $("table").replaceChildren(table);
    sort();
  }

  // ---- the page
  async function show(input) {
    state.input = input;
    const shown = panels.filter((panel) => !panel.pair);
    await Promise.all(shown.map((panel) => load(panel, input)));
    if (state.input !== input) return; // another one was chosen meanwhile
    for (const panel of shown) panel.maps = panel.loaded[input];
    [...$("inputs").children].forEach((node, at) => node.setAttribute("aria-checked", at === input));
    buildTable();
    choose(state.layer, state.head);
    waiting = false;
    drawNow();
  }

  async function begin() {
    if (!("DecompressionStream" in window)) throw new Error("this browser is too old: it has no DecompressionStream");
    panels.push(...models.map((model, index) => ({ model, index, name: model.name, loaded: {} })));
    if (models.length > 1) {
      panels.push({ pair: panels.slice(0, 2), get name() { return `${this.pair[1].name} − ${this.pair[0].name}`; } });
    }
    const difference = panels.at(-1);
    $("pair").hidden = models.length < 3;
    ["reference", "other"].forEach((id, side) => {
      for (const { name } of models) make("option", $(id), {}, name);
      $(id).selectedIndex = side;
      $(id).addEventListener("change", () => { difference.pair[side] = panels[$(id).selectedIndex]; draw(); });
    });
    pictures = inputs.map((input) => Object.assign(new Image(), input.image ? { src: input.image } : {}));
    inputs.forEach((input, index) => {
      const button = make("button", $("inputs"), { type: "button", role: "radio", title: input.name });
      if (input.image) make("img", button, { src: input.image, alt: "" });
      make("span", button, {}, input.name);
      button.addEventListener("click", () => show(index));
    });
    $("inputs").hidden = inputs.length < 2 && !inputs[0].image;
    if (!inputs[0].image) $("thumbs").value = "map";
    panels.forEach(build);
    for (const id of ["thumbs", "root", "shared"]) $(id).addEventListener("change", draw);
    window.addEventListener("resize", draw);
    dark.addEventListener("change", draw);
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") { state.held = false; draw(); } });
    await Promise.all(pictures.map((picture) => (picture.src ? picture.decode() : null)));
    const asked = new URLSearchParams(location.hash.slice(1)); // a link to what is shown
    const number = (name) => Math.floor(Number(asked.get(name))) || 0;
    Object.assign(state, { layer: number("layer"), head: Math.max(ROLLOUT, number("head")), query: number("token") });
    state.key = state.query;
    await show(clamp(number("input"), 0, inputs.length - 1));
  }

  const row = (panel, ...of) => [...rowOf(place(panels[panel], ...of.slice(0, 2)), of[2])]; // of the input shown
  window.explorer = { state, panels, row, show, ready: begin() };
  window.explorer.ready.catch((error) => {
    $("problem").hidden = false;
    $("problem").textContent = `The maps cannot be shown: ${error.message}`;
  });
})();
