// What each process did, a row for each kind of work. The server sends the spans of the range that is shown.
const KINDS = ["train", "weights", "generate", "env_step", "reward", "evaluate", "checkpoint", "wait"];
const INK = { train: "--c0", weights: "--c3", generate: "--c2", env_step: "--c1", reward: "--c5", evaluate: "--c4", checkpoint: "--c6", wait: "--dim" };
const ROW = 11, GAP = 9, NAME = 15, AXIS = 20;

function nice(seconds) {
  for (const s of [0.001, 0.01, 0.1, 0.25, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800]) if (s >= seconds) return s;
  return 2592000;
}

export default {
  template: `
    <div class="lanes">
      <div class="form" style="margin-bottom:6px">
        <div class="segment" role="group" aria-label="zoom"><button @click="fit" title="whole run (f)">whole run</button><button @click="scale(0.5)" title="zoom in (+)" aria-label="zoom in">+</button><button @click="scale(2)" title="zoom out (-)" aria-label="zoom out">−</button><button @click="pan(-0.3)" aria-label="earlier">‹</button><button @click="pan(0.3)" aria-label="later">›</button></div>
        <span class="dim" data-range>{{ range }}</span>
      </div>
      <div class="keys"><span v-for="k in kinds" :key="k"><span class="swatch" :style="{background: 'var(' + ink(k) + ')'}"></span>{{ names[k] }}</span></div>
      <canvas ref="canvas" tabindex="0" role="img" :aria-label="label" :style="{height: tall + 'px'}" @wheel.prevent="wheel" @pointerdown="down" @pointermove="move" @pointerup="up" @pointerleave="tip = null" @dblclick="scale(0.4, $event.offsetX)" @keydown="key"></canvas>
      <div v-if="tip" class="tip" :style="tip.style"><div v-for="line in tip.lines" :key="line">{{ line }}</div></div>
      <div v-if="lanes.length === 0" class="empty">no spans yet</div>
      <div class="detail" aria-live="polite"><template v-if="picked"><span v-for="line in picked.lines" :key="line">{{ line }}</span><a v-if="picked.href" :href="picked.href">ticket {{ picked.ticket }}</a></template><span v-else class="dim">Drag to move, wheel or +/− to zoom, click a bar for its ticket or step.</span></div>
    </div>`,
  props: { first: Object, base: String, follow: Boolean },
  data() { return { lanes: [], kinds: [], tall: 120, tip: null, picked: null, range: "", names: { train: "train", weights: "weight transfer", generate: "generate", env_step: "environment step", reward: "reward", evaluate: "evaluate", checkpoint: "checkpoint", wait: "wait" } }; },
  created() { this.view = null; this.spans = []; this.rows = []; this.marks = []; this.extent = [0, 1]; },
  mounted() {
    this.watcher = new ResizeObserver(() => this.draw());
    this.watcher.observe(this.$refs.canvas);
    this.theme = () => this.draw();
    window.addEventListener("themechange", this.theme);
    if (this.first) this.set(this.first);
  },
  unmounted() { this.watcher.disconnect(); window.removeEventListener("themechange", this.theme); },
  computed: { label() { return `Timeline of ${this.lanes.length} processes: ${this.lanes.join(", ")}. ${this.range}`; } },
  methods: {
    ink(kind) { return INK[kind] || "--c7"; },
    set(data) { // {lanes, spans: [[lane, kind, start, end, seconds, count, ticket, step]], bucket_s, extent, view?, marks}
      this.spans = data.spans; this.extent = data.extent; this.bucket = data.bucket_s; this.marks = data.marks || this.marks;
      this.lanes = data.lanes;
      if (data.view) this.view = data.view;
      this.view = this.view || [...this.extent];
      const there = new Map();
      for (const s of this.spans) { if (!there.has(s[0])) there.set(s[0], new Set()); there.get(s[0]).add(s[1]); }
      this.rows = []; this.place = new Map();
      let y = AXIS;
      this.lanes.forEach((name, lane) => {
        this.rows.push({ name, lane, y, kinds: KINDS.filter((k) => there.get(lane)?.has(k)) });
        y += NAME;
        for (const k of this.rows[this.rows.length - 1].kinds) { this.place.set(lane + k, y); y += ROW; }
        y += GAP;
      });
      this.kinds = KINDS.filter((k) => this.spans.some((s) => s[1] === k));
      this.tall = Math.max(60, y);
      this.draw();
    },
    ask() {
      clearTimeout(this.asking);
      this.asking = setTimeout(() => this.$emit("range", { start: this.view[0], end: this.view[1], px: this.$refs.canvas.clientWidth }), 90);
      this.draw();
    },
    grown(extent) { // the run goes on
      const at_end = this.view && this.view[1] >= this.extent[1] - 0.5, wide = this.view && this.view[0] <= this.extent[0];
      const by = extent[1] - this.extent[1];
      this.extent = extent;
      if (this.follow && at_end && by > 0) { this.view = [wide ? extent[0] : this.view[0] + by, extent[1]]; this.ask(); }
    },
    fit() { this.view = [...this.extent]; this.ask(); },
    scale(by, px) {
      const w = this.$refs.canvas.clientWidth, [a, b] = this.view, at = a + ((px === undefined ? w / 2 : px) / w) * (b - a);
      const span = Math.min(Math.max((b - a) * by, 0.05), (this.extent[1] - this.extent[0]) * 1.05 || 1);
      const k = (at - a) / (b - a);
      this.view = [at - span * k, at + span * (1 - k)]; this.ask();
    },
    pan(by) { const d = (this.view[1] - this.view[0]) * by; this.view = [this.view[0] + d, this.view[1] + d]; this.ask(); },
    wheel(e) { if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) this.pan(e.deltaX / 800); else this.scale(e.deltaY > 0 ? 1.25 : 0.8, e.offsetX); },
    key(e) {
      const act = { ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.scale(0.6), "=": () => this.scale(0.6), "-": () => this.scale(1.6), f: () => this.fit(), Home: () => this.fit() }[e.key];
      if (act) { e.preventDefault(); e.stopPropagation(); act(); }
    },
    down(e) { this.drag = { x: e.offsetX, view: this.view, moved: false }; this.$refs.canvas.setPointerCapture(e.pointerId); },
    up(e) {
      const drag = this.drag; this.drag = null;
      if (!drag || drag.moved) return;
      const s = this.hit(e.offsetX, e.offsetY);
      this.picked = s ? { lines: this.lines(s), ticket: s[6], href: s[6] > 0 ? `${this.base}/group/${s[6]}` : "" } : null;
    },
    move(e) {
      if (this.drag) {
        const d = ((this.drag.x - e.offsetX) / this.$refs.canvas.clientWidth) * (this.drag.view[1] - this.drag.view[0]);
        if (Math.abs(this.drag.x - e.offsetX) > 3) { this.drag.moved = true; this.view = [this.drag.view[0] + d, this.drag.view[1] + d]; this.ask(); }
        return;
      }
      const s = this.hit(e.offsetX, e.offsetY), w = this.$refs.canvas.clientWidth;
      this.tip = s ? { lines: this.lines(s), style: { top: `${e.offsetY + 100}px`, ...(e.offsetX > w / 2 ? { right: `${w - e.offsetX + 10}px` } : { left: `${e.offsetX + 10}px` }) } } : null;
    },
    lines(s) {
      const found = [`${this.lanes[s[0]]}: ${this.names[s[1]] || s[1]}`, `${rlearner.clock(s[2])}, ${rlearner.number(s[3] - s[2])} s long, ${rlearner.number(s[4])} s of work`];
      if (s[5] > 1) found.push(`${s[5]} pieces of work`);
      if (s[7] >= 0) found.push(`step ${s[7]}`);
      return found;
    },
    hit(x, y) {
      const [a, b] = this.view, w = this.$refs.canvas.clientWidth, t = a + (x / w) * (b - a), slack = ((b - a) / w) * 2;
      return this.spans.find((s) => { const top = this.place.get(s[0] + s[1]); return y >= top && y < top + ROW && t >= s[2] - slack && t <= s[3] + slack; });
    },
    draw() { if (!this.waiting) this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.paint(); }); },
    paint() {
      const canvas = this.$refs.canvas;
      if (!canvas || !canvas.clientWidth || !this.view) return;
      const ratio = devicePixelRatio || 1, w = canvas.clientWidth, h = this.tall, c = canvas.getContext("2d"), [a, b] = this.view;
      canvas.width = w * ratio; canvas.height = h * ratio; c.scale(ratio, ratio);
      const X = (t) => ((t - a) / (b - a)) * w, line = rlearner.color("--line"), dim = rlearner.color("--dim"), text = rlearner.color("--text");
      const step = nice((b - a) / Math.max(2, w / 110));
      c.font = "11px system-ui, sans-serif"; c.textBaseline = "top"; c.textAlign = "center";
      for (let t = Math.ceil(a / step) * step; t <= b; t += step) {
        c.strokeStyle = line; c.beginPath(); c.moveTo(Math.round(X(t)) + 0.5, AXIS - 5); c.lineTo(Math.round(X(t)) + 0.5, h); c.stroke();
        c.fillStyle = dim; c.fillText(step < 1 ? `${rlearner.clock(t)}.${String(Math.round((t % 1) * 1000)).padStart(3, "0")}` : rlearner.clock(t), X(t), 2);
      }
      for (const m of this.marks) if (m.time >= a && m.time <= b) { c.strokeStyle = m.kind === "death" || m.kind === "failed" ? rlearner.color("--bad") : rlearner.color("--warn"); c.setLineDash([3, 3]); c.beginPath(); c.moveTo(X(m.time), AXIS - 5); c.lineTo(X(m.time), h); c.stroke(); c.setLineDash([]); }
      c.textAlign = "left";
      for (const r of this.rows) { c.fillStyle = text; c.fillText(r.name, 4, r.y + 1); c.strokeStyle = line; c.beginPath(); c.moveTo(0, r.y - 4.5); c.lineTo(w, r.y - 4.5); c.stroke(); }
      for (const s of this.spans) {
        if (s[3] < a || s[2] > b) continue;
        const top = this.place.get(s[0] + s[1]), left = Math.max(X(s[2]), 0), right = Math.min(X(s[3]), w);
        c.fillStyle = rlearner.color(this.ink(s[1]));
        const share = s[3] > s[2] ? Math.min(1, s[4] / (s[3] - s[2])) : 1;
        if (this.bucket > 0) { c.globalAlpha = 0.14; c.fillRect(left, top, right - left, ROW - 2); c.globalAlpha = 0.9; const tall = Math.max(1, (ROW - 2) * share); c.fillRect(left, top + ROW - 2 - tall, Math.max(right - left - (right - left > 3 ? 0.5 : 0), 0.7), tall); }
        else { c.globalAlpha = s[1] === "wait" ? 0.4 : 0.85; c.fillRect(left, top, Math.max(right - left, 1), ROW - 2); }
        c.globalAlpha = 1;
      }
      const when = (t) => new Date(t * 1000).toLocaleString("en-GB");
      this.range = `${when(a)} to ${b - a > 86400 ? when(b) : rlearner.clock(b)}, ${rlearner.number(b - a)} s${this.bucket > 0 ? `, in buckets of ${rlearner.number(this.bucket)} s` : ""}`;
    },
  },
};
