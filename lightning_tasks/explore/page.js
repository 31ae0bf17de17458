"use strict";
// The page of `attnswap explore`. Text of anybody's goes through textContent alone; nothing is loaded from elsewhere.
(() => {
  const $ = (id) => document.getElementById(id);
  const { models, inputs, grids } = JSON.parse($("data").textContent);
  const MEAN = -1, ROLLOUT = -2; // in place of a head's number
  const POOL = 48; // pixels of a whole map made small
  const STATISTICS = { entropy: "entropy", sink: "sink mass", logit: "largest logit" };
  const VIRIDIS = [[68, 1, 84], [72, 36, 117], [65, 68, 135], [53, 95, 141], [42, 120, 142], [33, 145, 140],
    [34, 168, 132], [68, 191, 112], [122, 209, 81], [189, 223, 38], [253, 231, 37]];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const state = { input: 0, layer: 0, head: 0, query: 0, key: 0, pinned: false, sort: ["layer", 1] };
  const panels = [];

  const make = (tag, parent, attributes = {}, text = null) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== null) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };
  const range = (count) => Array.from({ length: count }, (_, index) => index);
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const shown = (value) => (value === null || !Number.isFinite(value) ? "–" :
    Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 0.1 ? value.toFixed(2) : Number(value.toPrecision(2)).toString());
  const headName = (head) => (head === MEAN ? "mean of heads" : head === ROLLOUT ? "rollout" : `head ${head}`);

  // ---- maps: bytes of the page, and rows and columns of them

  async function inflated(text) {
    const raw = atob(text), bytes = new Uint8Array(raw.length);
    for (let index = 0; index < raw.length; index++) bytes[index] = raw.charCodeAt(index);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  function unpacked(model, bytes) {
    const alone = model.layers.find((layer) => !layer.cross);
    const metas = model.rollout ? [...model.layers, { ...alone, heads: 1 }] : model.layers;
    const maps = metas.map((meta) => ({ meta, heads: meta.heads, rows: (meta.rows || range(meta.queries)).length, keys: meta.keys }));
    let end = 0, step = maps.reduce((sum, map) => sum + 8 * map.heads * map.rows, 0);
    for (const map of maps) {
      const count = map.heads * map.rows, { keys } = map;
      map.low = new Float32Array(bytes.buffer, end, count);
      map.high = new Float32Array(bytes.buffer, end + 4 * count, count);
      map.steps = bytes.subarray(step, step + count * keys);
      end += 8 * count;
      step += count * keys;
      for (let row = 0; row < count; row++) { // each row is what it adds to the one before it
        if (row % map.rows) for (let at = row * keys; at < (row + 1) * keys; at++) map.steps[at] += map.steps[at - keys];
      }
      map.signed = map.low.some((value) => value < -1e-6);
    }
    return maps;
  }

  const headsOf = (map, head) => (head === MEAN ? range(map.heads) : [head]);

  function rowOf(map, head, row) {
    const found = new Float32Array(map.keys), heads = headsOf(map, head);
    for (const each of heads) {
      const at = each * map.rows + row, low = map.low[at], step = (map.high[at] - low) / 255;
      for (let key = 0; key < map.keys; key++) found[key] += (low + step * map.steps[at * map.keys + key]) / heads.length;
    }
    return found;
  }

  function columnOf(map, head, key) {
    const found = new Float32Array(map.rows), heads = headsOf(map, head);
    for (const each of heads) {
      for (let row = 0; row < map.rows; row++) {
        const at = each * map.rows + row, low = map.low[at];
        found[row] += (low + (map.high[at] - low) / 255 * map.steps[at * map.keys + key]) / heads.length;
      }
    }
    return found;
  }

  // A map made small, each pixel the mean of its part.
  function pooled(map, head) {
    map.pool ||= new Map();
    if (map.pool.has(head)) return map.pool.get(head);
    const height = Math.min(POOL, map.rows), width = Math.min(POOL, map.keys), values = new Float32Array(height * width);
    if (head === MEAN) {
      for (const each of range(map.heads)) pooled(map, each).values.forEach((value, at) => { values[at] += value / map.heads; });
    } else {
      const counts = new Uint32Array(height * width), columns = Uint16Array.from(range(map.keys), (key) => key * width / map.keys);
      for (let row = 0; row < map.rows; row++) {
        const at = head * map.rows + row, low = map.low[at], step = (map.high[at] - low) / 255;
        const line = Math.floor(row * height / map.rows) * width;
        for (let key = 0; key < map.keys; key++) {
          values[line + columns[key]] += low + step * map.steps[at * map.keys + key];
          counts[line + columns[key]]++;
        }
      }
      counts.forEach((count, at) => { values[at] /= count; });
    }
    map.pool.set(head, { values, width, height });
    return map.pool.get(head);
  }

  // Keys that no row attends to: padding.
  function unseen(map) {
    if (map.unseen) return map.unseen;
    const found = new Uint8Array(map.keys).fill(map.signed ? 0 : 1);
    for (let at = 0; at < map.heads * map.rows; at++) {
      for (let key = 0; key < map.keys; key++) if (map.steps[at * map.keys + key]) found[key] = 0;
    }
    return (map.unseen = found);
  }

  const alike = (one, other) => one && other && one.rows === other.rows && one.keys === other.keys &&
    JSON.stringify(one.meta.rows) === JSON.stringify(other.meta.rows);
  const minus = (one, other) => one.map((value, at) => value - other[at]);

  // ---- panels: a model, or the difference of two; `at` finds the map of a place in the grid

  class Panel {
    constructor(index) { this.model = models[index]; this.index = index; this.loaded = new Map(); this.name = this.model.name; }
    get signed() { return this.maps.some((map) => map.signed); }
    async load(input) {
      if (!this.loaded.has(input)) this.loaded.set(input, unpacked(this.model, await inflated($(`maps-${this.index}-${input}`).textContent)));
      this.maps = this.loaded.get(input);
    }
    get layers() { return this.model.layers; }
    map(layer, head) {
      if (head === ROLLOUT) return this.model.rollout && layer === this.layers.length - 1 ? this.maps[this.layers.length] : null;
      return layer < this.layers.length && head < this.maps[layer].heads ? this.maps[layer] : null;
    }
    row(layer, head, row) { return rowOf(this.map(layer, head), Math.max(head, head === MEAN ? MEAN : 0), row); }
    column(layer, head, key) { return columnOf(this.map(layer, head), Math.max(head, head === MEAN ? MEAN : 0), key); }
    pool(layer, head) { return pooled(this.map(layer, head), Math.max(head, head === MEAN ? MEAN : 0)); }
    statistic(name, layer, head) {
      const of = this.layers[layer]?.[name]?.[state.input];
      return !of ? null : head === MEAN ? of.reduce((sum, value) => sum + value, 0) / of.length : of[head] ?? null;
    }
  }

  class Difference {
    constructor(first, second) { this.first = first; this.second = second; this.signed = true; }
    get name() { return `${this.second.name} − ${this.first.name}`; }
    get layers() { return this.second.layers; }
    async load() {}
    map(layer, head) {
      const [one, other] = [this.first.map(layer, head), this.second.map(layer, head)];
      return alike(one, other) ? other : null;
    }
    row(...place) { return minus(this.second.row(...place), this.first.row(...place)); }
    column(...place) { return minus(this.second.column(...place), this.first.column(...place)); }
    pool(...place) {
      const { values, ...size } = this.second.pool(...place);
      return { values: minus(values, this.first.pool(...place).values), ...size };
    }
    statistic(name, ...place) {
      const values = [this.second, this.first].map((each) => each.statistic(name, ...place));
      return values.includes(null) ? null : values[0] - values[1];
    }
  }

  // Half the sum of |difference| in a row, mean over the rows.
  function changed(first, second, layer, head) {
    const one = first.map(layer, head), other = second.map(layer, head);
    if (!alike(one, other)) return null;
    let sum = 0;
    for (let row = 0; row < one.rows; row++) {
      const values = [rowOf(one, head, row), rowOf(other, head, row)];
      for (let key = 0; key < one.keys; key++) sum += Math.abs(values[1][key] - values[0][key]);
    }
    return sum / 2 / one.rows;
  }

  // ---- colors

  const bright = (share) => ($("root").checked ? Math.sqrt(share) : share);
  const poles = () => (dark.matches ? [[90, 170, 255], [255, 160, 70]] : [[33, 102, 172], [205, 90, 0]]);
  function color(value, largest, signed) { // red, green, blue, opacity
    if (!Number.isFinite(value)) return [128, 128, 128, 0.25];
    const share = bright(clamp(Math.abs(value) / (largest || 1), 0, 1));
    if (signed) return [...poles()[value < 0 ? 0 : 1], share];
    const at = share * (VIRIDIS.length - 1), low = Math.min(Math.floor(at), VIRIDIS.length - 2);
    return [...range(3).map((part) => VIRIDIS[low][part] + (at - low) * (VIRIDIS[low + 1][part] - VIRIDIS[low][part])), 1];
  }
  const css = ([red, green, blue, opacity]) => `rgba(${red | 0}, ${green | 0}, ${blue | 0}, ${opacity})`;
  const largestOf = (values, from = 0) => {
    let largest = 0;
    for (let at = from; at < values.length; at++) if (Math.abs(values[at]) > largest) largest = Math.abs(values[at]);
    return largest;
  };
  const scratch = document.createElement("canvas");
  function tile(values, width, height, largest, signed, opacity = null) {
    scratch.width = width;
    scratch.height = height;
    const context = scratch.getContext("2d"), pixels = context.createImageData(width, height);
    const table = range(signed ? 513 : 257).map((at) => color((signed ? at - 256 : at) / 256, 1, signed));
    for (let at = 0; at < width * height && at < values.length; at++) {
      const value = values[at] / (largest || 1);
      const [red, green, blue, alpha] = Number.isFinite(value) ? table[clamp(Math.round(value * 256), signed ? -256 : 0, 256) + (signed ? 256 : 0)] : color(NaN);
      const share = signed || !opacity ? alpha : opacity(clamp(value, 0, 1));
      pixels.data.set([red, green, blue, 255 * share], 4 * at);
    }
    context.putImageData(pixels, 0, 0);
    return scratch;
  }
  function bar(node, largest, signed) {
    const stops = range(11).map((at) => css(color(signed ? at / 5 - 1 : at / 10, 1, signed)));
    const root = $("root").checked && !signed ? range(11).map((at) => css(color(at / 10, 1, false))) : stops;
    node.querySelector("i").style.background = `linear-gradient(to right, ${root.join(", ")})`;
    node.firstChild.textContent = signed ? shown(-largest) : "0";
    node.lastChild.textContent = shown(largest);
  }
  function canvasOf(canvas, width, height) {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = false;
    return context;
  }

  // ---- tokens: their names, and which of them is marked

  const grid = (count) => (inputs[state.input].image && grids[count]) || null; // before the patches, rows, columns
  function names(meta, ofKeys) {
    const input = inputs[state.input], list = meta.source || (ofKeys && meta.cross) ? input.source : input.tokens;
    return list && list.length === (ofKeys ? meta.keys : meta.queries) ? list : null;
  }
  function tokenName(meta, ofKeys, at) {
    const list = names(meta, ofKeys), places = grid(ofKeys ? meta.keys : meta.queries);
    if (list) return `“${list[at]}” (${at})`;
    if (!places || at < places[0]) return `token ${at}`;
    return `patch ${Math.floor((at - places[0]) / places[2])},${(at - places[0]) % places[2]}`;
  }
  const rowsOf = (meta) => meta.rows || range(meta.queries);
  function rowOfQuery(meta) { // that of the marked query, or of the nearest that is shown
    const rows = rowsOf(meta), query = clamp(state.query, 0, meta.queries - 1);
    return rows.reduce((best, row, at) => (Math.abs(row - query) < Math.abs(rows[best] - query) ? at : best), 0);
  }
  function byQuery(meta, values) { // values of the rows that are shown, at their queries
    if (!meta.rows) return values;
    const found = new Float32Array(meta.queries).fill(NaN);
    meta.rows.forEach((row, at) => { found[row] = values[at]; });
    return found;
  }
  function mark(meta, ofKeys, at) {
    const count = ofKeys ? meta.keys : meta.queries;
    at = clamp(at, 0, count - 1);
    if (ofKeys || !meta.cross) state.key = at;
    if (!ofKeys || !meta.cross) state.query = at;
    draw();
  }
  const meta = () => (panels.map((panel) => panel.map(state.layer, state.head)).find(Boolean) || panels[0].maps[0]).meta;

  // ---- a panel on the page

  function build(panel) {
    const root = (panel.root = make("article", $("panels"), { class: "panel" }));
    panel.title = make("h2", root);
    panel.caption = make("p", root, { class: "caption" });
    panel.scroll = make("div", root, { class: "scroll" });
    panel.grid = make("canvas", panel.scroll, { tabindex: 0, role: "application", "aria-roledescription": "grid of attention maps; arrow keys choose layer and head" });
    panel.grid.addEventListener("click", (event) => choose(...cellAt(panel, event)));
    panel.grid.addEventListener("pointermove", (event) => { panel.grid.title = cellTitle(panel, ...cellAt(panel, event)); });
    panel.grid.addEventListener("keydown", gridKey);
    panel.gridBar = scaleBar(root);
    const pair = make("div", root, { class: "views" });
    panel.views = [["attends to", true], ["is attended by", false]].map(([text, ofKeys]) => view(panel, pair, text, ofKeys));
    const whole = make("details", root, inputs[0].image ? {} : { open: "" });
    make("summary", whole, {}, "the whole map");
    panel.whole = make("canvas", whole, { class: "whole", role: "img" });
    panel.whole.addEventListener("pointermove", (event) => wholeAt(panel, event));
    panel.whole.addEventListener("click", (event) => { state.pinned = !state.pinned; wholeAt(panel, event, true); draw(); });
    whole.addEventListener("toggle", draw);
  }

  function scaleBar(parent) {
    const node = make("div", parent, { class: "bar", "aria-hidden": "true" });
    make("span", node);
    make("i", node);
    make("span", node);
    return node;
  }

  function view(panel, parent, text, ofKeys) {
    const figure = make("figure", parent), found = { panel, text, ofKeys, caption: make("figcaption", figure) };
    found.chips = make("div", figure, { class: "tokens" });
    found.canvas = make("canvas", figure, { tabindex: 0, role: "img" });
    found.list = make("div", figure, { class: "tokens list", tabindex: 0, role: "img" });
    found.bar = scaleBar(figure);
    found.top = make("p", figure, { class: "top" });
    const pointed = (event) => (event.target.dataset.at !== undefined ? Number(event.target.dataset.at) : event.target === found.canvas ? patchAt(found, event) : null);
    for (const node of [found.chips, found.list, found.canvas]) {
      node.addEventListener("pointermove", (event) => { const at = pointed(event); if (at !== null && !state.pinned) mark(meta(), ofKeys, at); });
      node.addEventListener("click", (event) => { const at = pointed(event); if (at !== null) { state.pinned = !state.pinned; mark(meta(), ofKeys, at); } });
      node.addEventListener("keydown", (event) => tokenKey(event, ofKeys));
    }
    return found;
  }

  function patchAt(found, event) {
    const of = meta(), places = grid(found.ofKeys ? of.keys : of.queries), box = found.canvas.getBoundingClientRect();
    const [row, column] = [clamp((event.clientY - box.top) / box.height, 0, 0.9999), clamp((event.clientX - box.left) / box.width, 0, 0.9999)];
    return places[0] + Math.floor(row * places[1]) * places[2] + Math.floor(column * places[2]);
  }

  function tokenKey(event, ofKeys) {
    const of = meta(), places = grid(ofKeys ? of.keys : of.queries), line = places ? places[2] : 10;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -line, ArrowDown: line }[event.key];
    if (event.key === "Escape") state.pinned = false;
    else if (step === undefined) return;
    event.preventDefault();
    state.pinned = event.key !== "Escape";
    mark(of, ofKeys, (ofKeys ? state.key : state.query) + (step || 0));
  }

  function gridKey(event) {
    const heads = gridHeads(), layers = Math.max(...panels.map((panel) => panel.layers.length)), at = heads.indexOf(state.head);
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!moves[event.key]) return;
    event.preventDefault();
    const [across, down] = moves[event.key], head = heads[clamp(at + down, 0, heads.length - 1)];
    choose(head === ROLLOUT ? (down ? layers - 1 : state.layer) : clamp(state.layer + across, 0, layers - 1), head);
  }

  const gridHeads = () => {
    const most = Math.max(...panels.flatMap((panel) => panel.layers.map((layer) => layer.heads)));
    return [...range(most), MEAN, ...(models.some((model) => model.rollout) ? [ROLLOUT] : [])];
  };
  const cellAt = (panel, event) => {
    const box = panel.grid.getBoundingClientRect(), { left, cell } = panel.sizes, heads = gridHeads();
    const layer = Math.floor((event.clientX - box.left - left) / cell), line = Math.floor((event.clientY - box.top) / cell);
    return [clamp(layer, 0, panel.layers.length - 1), heads[clamp(line, 0, heads.length - 1)]];
  };
  const cellTitle = (panel, layer, head) => [`layer ${layer} (${panel.layers[layer].name}), ${headName(head)}`,
    ...(head === ROLLOUT ? [] : Object.entries(STATISTICS).map(([name, text]) => `${text} ${shown(panel.statistic(name, layer, head))}`))].join(", ");

  function choose(layer, head) {
    state.layer = head === ROLLOUT ? Math.max(...panels.map((panel) => panel.layers.length)) - 1 : layer;
    state.head = head;
    const of = meta();
    state.query = clamp(state.query, 0, of.queries - 1);
    state.key = of.cross ? clamp(state.key, 0, of.keys - 1) : clamp(state.query, 0, of.keys - 1);
    draw();
  }

  // ---- drawing

  function cellValues(panel, layer, head, kind) {
    const map = panel.map(layer, head);
    if (!map) return null;
    if (kind === "map") return panel.pool(layer, head);
    const ofKeys = kind === "from", of = map.meta;
    const values = ofKeys ? panel.row(layer, head, rowOfQuery(of)) : byQuery(of, panel.column(layer, head, clamp(state.key, 0, of.keys - 1)));
    const places = grid(values.length);
    if (!places) return { values, width: values.length, height: 1 };
    return { values: values.subarray(places[0]), width: places[2], height: places[1] };
  }

  function drawGrid(panel) {
    const kind = $("thumbs").value, heads = gridHeads(), layers = panel.layers.length, left = 50, bottom = 18;
    const cell = clamp(Math.floor((panel.scroll.clientWidth - left) / layers), 16, 64);
    panel.sizes = { left, cell };
    const context = canvasOf(panel.grid, left + layers * cell, heads.length * cell + bottom);
    const style = getComputedStyle(document.body), places = heads.flatMap((head, line) => range(layers).map((layer) => [layer, head, line]));
    context.font = `11px ${style.fontFamily}`;
    context.textBaseline = "middle";
    const isNumber = kind in STATISTICS;
    const found = places.map(([layer, head]) => (isNumber ? (head === ROLLOUT ? null : panel.statistic(kind, layer, head)) : cellValues(panel, layer, head, kind)));
    const largest = found.map((each) => (each === null ? 0 : isNumber ? Math.abs(each) : largestOf(each.values)));
    const most = Math.max(0, ...largest), common = isNumber || panel instanceof Difference || $("shared").checked;
    panel.most = most;
    const scale = $("shared").checked && !(panel instanceof Difference) ? Math.max(...panels.filter((each) => !(each instanceof Difference)).map((each) => each.most || 0)) : most;
    places.forEach(([layer, head, line], at) => {
      const [x, y, size] = [left + layer * cell + 1, line * cell + 1, cell - 2], each = found[at];
      if (each === null) {
        context.strokeStyle = style.getPropertyValue("--line");
        if (head !== ROLLOUT) context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
      } else if (isNumber) {
        context.fillStyle = css(color(each, scale, panel.signed && each < 0 || panel instanceof Difference));
        context.fillRect(x, y, size, size);
      } else {
        context.imageSmoothingEnabled = each.width > 1.5 * size;
        context.drawImage(tile(each.values, each.width, each.height, common ? scale : largest[at], panel.signed), x, y, size, size);
      }
      if (layer === state.layer && head === state.head) {
        context.lineWidth = 3;
        context.strokeStyle = style.getPropertyValue("--accent");
        context.strokeRect(x, y, size, size);
        context.lineWidth = 1;
      }
    });
    context.fillStyle = style.getPropertyValue("--soft");
    heads.forEach((head, line) => context.fillText(head === MEAN ? "mean" : head === ROLLOUT ? "rollout" : cell < 20 && head % 2 ? "" : `head ${head}`, 0, (line + 0.5) * cell));
    range(layers).forEach((layer) => {
      context.textAlign = "center";
      if (cell >= 20 || layer % 2 === 0) context.fillText(layer, left + (layer + 0.5) * cell, heads.length * cell + 10);
    });
    context.textAlign = "right";
    context.fillText("layer", left - 6, heads.length * cell + 10);
    panel.gridBar.hidden = !common;
    if (common) bar(panel.gridBar, scale, panel.signed);
    panel.grid.setAttribute("aria-label", `${panel.name}: ${cellTitle(panel, clamp(state.layer, 0, layers - 1), state.head)}`);
  }

  function drawView(found, values, largest, marked) {
    const { panel, ofKeys } = found, map = panel.map(state.layer, state.head), count = values.length, places = grid(count);
    const input = inputs[state.input], chips = places ? places[0] : 0, faint = ofKeys ? unseen(map) : null, list = places ? null : names(map.meta, ofKeys);
    colorTokens(found.chips, range(chips).map((at) => `token ${at}`), values, largest, panel.signed, marked, null);
    found.chips.hidden = !chips;
    found.canvas.hidden = !places;
    found.list.hidden = Boolean(places);
    colorTokens(found.list, places ? [] : list || range(count).map(String), values, largest, panel.signed, marked, faint);
    if (places) {
      const width = clamp(Math.floor(found.canvas.parentNode.clientWidth), 80, 420), picture = found.panel.pictures[state.input];
      const height = Math.round(width * picture.naturalHeight / picture.naturalWidth) || width;
      const context = canvasOf(found.canvas, width, height);
      context.drawImage(picture, 0, 0, width, height);
      context.drawImage(tile(values.subarray(chips), places[2], places[1], largest, panel.signed, (share) => 0.2 + 0.7 * bright(share)), 0, 0, width, height);
      if (marked >= chips) {
        const [cellWidth, cellHeight] = [width / places[2], height / places[1]];
        context.lineWidth = 4;
        const box = [((marked - chips) % places[2]) * cellWidth, Math.floor((marked - chips) / places[2]) * cellHeight, cellWidth, cellHeight];
        for (const [line, stroke] of [[4, "#000"], [2, "#fff"]]) {
          context.lineWidth = line;
          context.strokeStyle = stroke;
          context.strokeRect(...box);
        }
      }
    }
    const order = range(count).filter((at) => Number.isFinite(values[at])).sort((one, other) => Math.abs(values[other]) - Math.abs(values[one])).slice(0, 3);
    found.top.textContent = order.map((at) => `${tokenName(map.meta, ofKeys, at)} ${shown(values[at])}`).join(" · ");
    const of = map.meta, subject = ofKeys ? tokenName(of, false, rowsOf(of)[rowOfQuery(of)]) : tokenName(of, true, state.key);
    found.caption.textContent = `${subject} ${found.text}`;
    (places ? found.canvas : found.list).setAttribute("aria-label", `${panel.name}: ${subject} ${found.text} most: ${found.top.textContent}`);
    bar(found.bar, largest, panel.signed);
  }

  function colorTokens(node, texts, values, largest, signed, marked, faint) {
    if (node.texts !== texts.join("\0")) {
      node.texts = texts.join("\0");
      node.replaceChildren(...texts.map((text, at) => make("span", null, { "data-at": at }, text)));
      node.levels = new Array(texts.length);
    }
    texts.forEach((_, at) => { // only what looks another way is written: texts of thousands of tokens
      const level = Number.isFinite(values[at]) ? Math.round(24 * bright(clamp(Math.abs(values[at]) / (largest || 1), 0, 1))) * (values[at] < 0 ? -1 : 1) : null;
      const looks = `${level} ${signed} ${at === marked} ${faint && faint[at]} ${dark.matches}`;
      if (node.levels[at] === looks) return;
      const span = node.children[at];
      node.levels[at] = looks;
      span.className = `${at === marked ? "marked" : ""} ${faint && faint[at] ? "unseen" : ""} ${level === null ? "absent" : ""}`;
      span.style.background = level ? css([...poles()[signed && level > 0 ? 1 : 0], Math.abs(level) / 24]) : "";
      span.classList.toggle("strong", Math.abs(level) > 14);
    });
  }

  function drawWhole(panel) {
    const map = panel.map(state.layer, state.head), side = clamp(panel.whole.parentNode.clientWidth, 100, 420);
    const { values, width, height } = map.rows * map.keys <= 1 << 18 ? whole(panel, map) : panel.pool(state.layer, state.head);
    const context = canvasOf(panel.whole, side, Math.round(side * clamp(map.rows / map.keys, 0.25, 1)));
    const [wide, high] = [parseFloat(panel.whole.style.width), parseFloat(panel.whole.style.height)];
    context.imageSmoothingEnabled = width > 1.5 * wide;
    context.drawImage(tile(values, width, height, largestOf(values), panel.signed), 0, 0, wide, high);
    context.strokeStyle = "#888";
    context.strokeRect(0, rowOfQuery(map.meta) / map.rows * high, wide, high / map.rows);
    context.strokeRect(state.key / map.keys * wide, 0, wide / map.keys, high);
    panel.whole.setAttribute("aria-label", `whole map of ${panel.name}: a row for each query, a column for each key`);
  }
  function whole(panel, map) {
    const values = new Float32Array(map.rows * map.keys);
    for (let row = 0; row < map.rows; row++) values.set(panel.row(state.layer, state.head, row), row * map.keys);
    return { values, width: map.keys, height: map.rows };
  }
  function wholeAt(panel, event, always = false) {
    if (state.pinned && !always) return;
    const of = panel.map(state.layer, state.head).meta, box = panel.whole.getBoundingClientRect(), rows = rowsOf(of);
    state.query = rows[clamp(Math.floor((event.clientY - box.top) / box.height * rows.length), 0, rows.length - 1)];
    state.key = clamp(Math.floor((event.clientX - box.left) / box.width * of.keys), 0, of.keys - 1);
    draw();
  }

  let waiting = false, said = 0;
  function draw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; drawNow(); });
  }
  function drawNow() {
    const found = panels.map((panel) => {
      const map = panel.map(state.layer, state.head);
      if (!map) return null;
      const row = panel.row(state.layer, state.head, rowOfQuery(map.meta));
      return [row, byQuery(map.meta, panel.column(state.layer, state.head, clamp(state.key, 0, map.keys - 1)))];
    });
    const largest = found.map((pair) => pair && pair.map((values) => largestOf(values, grid(values.length)?.[0] || 0)));
    const common = [0, 1].map((at) => Math.max(0, ...largest.filter((_, panel) => largest[panel] && !(panels[panel] instanceof Difference)).map((pair) => pair[at])));
    if ($("shared").checked) panels.forEach(drawGrid); // which finds the largest of all
    panels.forEach((panel, number) => {
      drawGrid(panel);
      const place = `layer ${state.layer}, ${headName(state.head)}`;
      panel.title.textContent = panel.name;
      const map = panel.map(state.layer, state.head);
      panel.root.classList.toggle("empty", !map);
      panel.caption.textContent = map ? cellTitle(panel, state.layer, state.head) : `${place}: ${panel instanceof Difference ? "no difference, as the maps have other sizes" : "not in this model"}`;
      if (!map) return;
      panel.views.forEach((each, at) => drawView(each, found[number][at], $("shared").checked && !(panel instanceof Difference) ? common[at] : largest[number][at],
        at ? clamp(state.query, 0, map.meta.queries - 1) : clamp(state.key, 0, map.keys - 1)));
      if (panel.whole.parentNode.open) drawWhole(panel);
    });
    for (const row of document.querySelectorAll("#table tbody tr")) row.toggleAttribute("data-chosen", row.dataset.place === `${state.layer} ${state.head}`);
    clearTimeout(said);
    said = setTimeout(() => { $("said").textContent = sentence(); }, 300); // not at each step of a pointer
  }
  function sentence() {
    const of = meta(), parts = panels.filter((panel) => panel.map(state.layer, state.head)).map((panel) => `${panel.name}: ${panel.views.map((each) => `${each.text} ${each.top.textContent}`).join("; ")}`);
    return `Layer ${state.layer}, ${headName(state.head)}, ${tokenName(of, false, clamp(state.query, 0, of.queries - 1))}${state.pinned ? " (held; Escape or a click lets go)" : ""}. ${parts.join(". ")}.`;
  }

  // ---- the table of heads

  function buildTable() {
    const of = panels.filter((panel) => panel instanceof Panel), table = make("table", null);
    const columns = [{ id: "layer", text: "layer" }, { id: "head", text: "head" }];
    of.forEach((panel, number) => {
      for (const [name, text] of Object.entries(STATISTICS)) columns.push({ id: `${name} ${number}`, text, value: (layer, head) => panel.statistic(name, layer, head) });
      if (number) columns.push({ id: `changed ${number}`, text: "changed", value: (layer, head) => changed(of[0], panel, layer, head) });
    });
    const head = make("thead", table), groups = make("tr", head), line = make("tr", head), body = make("tbody", table);
    make("th", groups, { colspan: 2 });
    of.forEach((panel, number) => make("th", groups, { colspan: number ? 4 : 3, scope: "colgroup" }, panel.name));
    const rows = range(Math.max(...of.map((panel) => panel.layers.length))).flatMap((layer) => {
      const heads = Math.max(...of.map((panel) => panel.layers[layer]?.heads || 0));
      return range(heads).map((each) => ({ layer, head: each, values: columns.map((column) => (column.value ? column.value(layer, each) : { layer, head: each }[column.id])) }));
    });
    for (const row of rows) {
      row.node = make("tr", null, { tabindex: 0, "data-place": `${row.layer} ${row.head}` });
      row.values.forEach((value, at) => make(at < 2 ? "th" : "td", row.node, at < 2 ? { scope: "row" } : {}, at < 2 ? String(value) : shown(value)));
      row.node.addEventListener("click", () => choose(row.layer, row.head));
      row.node.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(row.layer, row.head); });
    }
    const sort = () => {
      const at = columns.findIndex((column) => column.id === state.sort[0]), way = state.sort[1];
      const number = (value) => (value === null ? Infinity : way * value); // what is not known comes last
      rows.sort((one, other) => number(one.values[at]) - number(other.values[at]) || one.layer - other.layer || one.head - other.head);
      body.replaceChildren(...rows.map((row) => row.node));
      columns.forEach((column) => column.node.setAttribute("aria-sort", column.id !== state.sort[0] ? "none" : way > 0 ? "ascending" : "descending"));
    };
    for (const column of columns) {
      column.node = make("th", line, { scope: "col" });
      make("button", column.node, { type: "button" }, column.text).addEventListener("click", () => {
        state.sort = [column.id, state.sort[0] === column.id ? -state.sort[1] : column.value ? -1 : 1];
        sort();
      });
    }
    $("table").replaceChildren(table);
    sort();
  }

  // ---- the page

  async function show(input) {
    state.input = input;
    await Promise.all(panels.map((panel) => panel.load(input)));
    for (const node of $("inputs").children) node.setAttribute("aria-checked", String(Number(node.dataset.input) === input));
    choose(state.layer, state.head);
    buildTable();
    drawNow();
  }

  async function begin() {
    if (!("DecompressionStream" in window)) throw new Error("this browser is too old: it has no DecompressionStream");
    panels.push(...range(models.length).map((index) => new Panel(index)));
    const pictures = inputs.map((input) => { const picture = new Image(); if (input.image) picture.src = input.image; return picture; });
    inputs.forEach((input, index) => {
      const button = make("button", $("inputs"), { type: "button", role: "radio", "data-input": index, title: input.name });
      if (input.image) make("img", button, { src: input.image, alt: "" });
      make("span", button, {}, input.name);
      button.addEventListener("click", () => show(index));
    });
    $("inputs").hidden = inputs.length < 2 && !inputs[0].image;
    if (panels.length > 1) panels.push(new Difference(panels[0], panels[1]));
    for (const panel of panels) panel.pictures = pictures;
    panels.forEach(build);
    if (models.length > 2) {
      const difference = panels.at(-1);
      $("pair").hidden = false;
      [["reference", "first", 0], ["other", "second", 1]].forEach(([id, side, chosen]) => {
        models.forEach((model, index) => make("option", $(id), { value: index }, model.name));
        $(id).value = chosen;
        $(id).addEventListener("change", () => { difference[side] = panels[Number($(id).value)]; draw(); });
      });
    }
    if (!inputs[0].image) $("thumbs").value = "map";
    for (const id of ["thumbs", "root", "shared"]) $(id).addEventListener("change", draw);
    window.addEventListener("resize", draw);
    dark.addEventListener("change", draw);
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") { state.pinned = false; draw(); } });
    await Promise.all(pictures.map((picture) => (picture.src ? picture.decode() : null)));
    await show(0);
  }
  const value = (model, layer, head, row, key) => panels[model].row(layer, head, row)[key]; // of the input that is shown
  window.explorer = { state, panels, value, show, ready: begin() };
  window.explorer.ready.catch((error) => { $("problem").hidden = false; $("problem").textContent = `The maps cannot be shown: ${error.message}`; });
})();
