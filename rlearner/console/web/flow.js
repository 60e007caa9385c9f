// The way of a ticket through the streams, with live counts. Wraps on a narrow screen.
export default {
  template: `<div class="flow" role="group" aria-label="queues and tickets"><template v-for="p in own" :key="p.key">
    <div v-if="p.node" class="node" :data-flow="p.key"><b>{{ p.node }}</b><span v-for="line in p.lines" :key="line">{{ line }}</span></div>
    <div v-else class="edge" :data-flow="p.key" :title="p.title"><b>{{ p.count === null || p.count === undefined ? '–' : p.count }}</b>{{ p.edge }}<i aria-hidden="true">{{ p.both ? '⟷' : '⟶' }}</i></div></template></div>`,
  props: { parts: Array },
  data() { return { own: this.parts || [] }; },
  methods: { change(parts) { const by = new Map(parts.map((p) => [p.key, p])); this.own = this.own.map((p) => by.get(p.key) || p); } },
};
