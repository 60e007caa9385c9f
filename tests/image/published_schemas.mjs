// Validates custom resources of Kubernetes, a JSON list on standard input, against the models of their operators.
const packages = {
    "keda.sh/v1alpha1": "keda",
    "monitoring.coreos.com/v1": "prometheus-operator",
    "cert-manager.io/v1": "cert-manager",
};
let text = "";
for await (const part of process.stdin) text += part;
for (const one of JSON.parse(text)) {
    const file = `@kubernetes-models/${packages[one.apiVersion]}/${one.apiVersion}/${one.kind}`;
    try {
        const model = (await import(file))[one.kind];
        new model(one).validate();
        console.log(`${one.kind} ${one.metadata.name}: ok`);
    } catch (error) {
        process.exitCode = 1;
        console.log(`${one.kind} ${one.metadata.name}: ${error.message}`);
    }
}
