// A row of figures; only those that changed are sent.
export default {
  template: `<div class="stats"><div v-for="s in own" :key="s.key" class="stat" :data-stat="s.key"><div class="k">{{ s.label }}</div><div class="v" :class="s.tone">{{ text(s.value) }}</div><div class="s" :title="s.note">{{ s.note }}</div></div></div>`,
  props: { stats: Array },
  data() { return { own: this.stats || [] }; },
  methods: {
    text(v) { return v === null || v === undefined ? "–" : typeof v === "number" ? rlearner.number(v) : v; },
    change(stats, points) {
      if (points) rlearner.tellCharts("points", points);
      const by = new Map(stats.map((s) => [s.key, s])); this.own = this.own.map((s) => by.get(s.key) || s); for (const s of stats) if (!this.own.some((o) => o.key === s.key)) this.own.push(s);
    },
  },
};
