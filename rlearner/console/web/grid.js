// A table whose cells are text: nothing in a run can become markup. Rows are replaced by key, only if they changed.
export default {
  template: `
    <div class="tablebox" :class="{more}"><div class="tablewrap" ref="wrap" :tabindex="scrolls ? 0 : null" :role="scrolls ? 'region' : null" :aria-label="scrolls ? label + ', scrolls sideways' : null" @scroll.passive="measure">
      <table class="t" :aria-label="label">
        <thead><tr><th v-for="c in columns" :key="c.key" :class="{n: c.n}" :aria-sort="sorted(c)" scope="col">
          <button v-if="c.sort !== false && c.title" @click="by(c)">{{ c.title }}{{ mark(c) }}</button><template v-else>{{ c.title }}</template></th></tr></thead>
        <tbody><tr v-for="row in visible" :key="row.key" :class="{on: row.on}">
          <td v-for="c in columns" :key="c.key" :class="[c.n ? 'n' : '', c.wrap ? 'wrap' : '', c.mono ? 'mono' : '', tone(row, c)]" :title="c.wrap ? null : text(row, c)">
            <input v-if="c.kind === 'pick'" type="checkbox" :checked="row.on" :aria-label="'compare ' + row.key" @change="$emit('pick', row.key)">
            <button v-else-if="c.kind === 'button' && row[c.key]" class="btn" @click="$emit('press', {key: row.key, name: c.key})">{{ row[c.key] }}</button>
            <a v-else-if="row[c.key + '_href']" :href="row[c.key + '_href']"><span v-if="row[c.key + '_color']" class="swatch" :style="{background: row[c.key + '_color']}"></span>{{ text(row, c) }}</a>
            <span v-else-if="c.kind === 'pill'" class="pill" :class="row[c.key + '_tone']">{{ text(row, c) }}</span>
            <template v-else>{{ text(row, c) }}</template>
          </td></tr></tbody>
      </table>
      <div v-if="!visible.length" class="empty">{{ needle ? 'nothing matches' : empty }}</div>
    </div><div v-if="more" class="cue" aria-hidden="true">scroll ›</div></div>`,
  props: { columns: Array, rows: Array, label: String, empty: { type: String, default: "none" }, filterable: Boolean },
  data() { return { own: this.rows || [], order: null, down: false, needle: "", scrolls: false, more: false }; },
  mounted() {
    this.watcher = new ResizeObserver(() => this.measure());
    this.watcher.observe(this.$refs.wrap);
    this.watcher.observe(this.$refs.wrap.firstElementChild);
    if (!this.filterable) return;
    this.listen = (e) => { this.needle = e.detail.toLowerCase(); };
    window.addEventListener("grid-filter", this.listen);
  },
  unmounted() { this.watcher.disconnect(); if (this.listen) window.removeEventListener("grid-filter", this.listen); },
  computed: {
    visible() {
      let rows = this.own;
      if (this.needle) rows = rows.filter((r) => Object.values(r).some((v) => String(v).toLowerCase().includes(this.needle)));
      if (!this.order) return rows;
      const k = this.order, sign = this.down ? -1 : 1;
      const key = (r) => (r[k + "_sort"] !== undefined ? r[k + "_sort"] : r[k]);
      return [...rows].sort((a, b) => { const x = key(a), y = key(b); return (x === y ? 0 : x === null || x === undefined || x < y ? -1 : 1) * sign; });
    },
  },
  methods: {
    measure() { // whether columns are out of sight, and whether more are to the right
      const { scrollWidth, clientWidth, scrollLeft } = this.$refs.wrap;
      this.scrolls = scrollWidth > clientWidth + 1;
      this.more = scrollLeft + clientWidth < scrollWidth - 1;
    },
    text(row, c) { const v = row[c.key]; return v === null || v === undefined ? "–" : typeof v === "number" ? rlearner.number(v) : v; },
    tone(row, c) { return c.kind === "pill" ? "" : row[c.key + "_tone"] || ""; },
    by(c) { if (this.order === c.key) this.down = !this.down; else { this.order = c.key; this.down = !!c.n; } },
    sorted(c) { return this.order === c.key ? (this.down ? "descending" : "ascending") : null; },
    mark(c) { return this.order === c.key ? (this.down ? " ↓" : " ↑") : ""; },
    change(rows, order) { // rows that changed or came; order: all keys
      const now = new Map(this.own.map((r) => [r.key, r]));
      for (const r of rows) now.set(r.key, r);
      this.own = order.map((k) => now.get(k)).filter(Boolean);
    },
  },
};
