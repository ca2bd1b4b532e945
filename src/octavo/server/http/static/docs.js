"use strict";

// Shows /openapi.json: each endpoint with the fields of its body and of its reply.

const LIMITS = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"]];
const EXAMPLE_ORIGIN = "http://localhost:8000"; // in the description

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function resolve(api, schema) {
  return schema.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema;
}

function typeName(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) {
    const names = schema.anyOf.filter((each) => each.type !== "null").map(typeName);
    return [...new Set(names)].join(" or ");
  }
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeName(schema.items ?? {})}`;
  if (schema.type === "object" && schema.additionalProperties) {
    return `object of ${typeName(schema.additionalProperties)}`;
  }
  return schema.type ?? "anything";
}

// Limits beyond JavaScript's safe integers are powers of two, or one less, which it rounds.
function limit(sign, value) {
  if (Math.abs(value) <= Number.MAX_SAFE_INTEGER) return `${sign} ${value}`;
  const power = `2^${Math.round(Math.log2(Math.abs(value)))}`;
  return value < 0 ? `${sign} -${power}` : `< ${power}`;
}

function fieldList(schema) {
  const list = make("dl");
  const required = new Set(schema.required ?? []);
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const title = make("dt");
    title.append(make("code", name));
    const limits = [field, ...(field.anyOf ?? [])].flatMap((each) =>
      LIMITS.filter(([key]) => key in each).map(([key, sign]) => limit(sign, each[key])),
    );
    const notes = [typeName(field), ...limits, ...(required.has(name) ? ["required"] : [])];
    const text = make("dd", field.description ? `${field.description} ` : "");
    text.append(make("span", notes.join(", "), "type"));
    list.append(title, text);
  }
  return list;
}

// The structures inside a structure, each once, in order of appearance.
function inside(api, schema, found = new Map()) {
  for (const value of Object.values(schema ?? {})) {
    if (typeof value !== "object" || value === null) continue;
    if (value.$ref && !found.has(value.$ref)) {
      found.set(value.$ref, resolve(api, value));
      inside(api, found.get(value.$ref), found);
    }
    inside(api, value, found);
  }
  return found;
}

function structure(api, title, reference, open) {
  const details = make("details");
  details.open = open;
  details.append(make("summary", title));
  const schema = resolve(api, reference);
  details.append(fieldList(schema));
  for (const [name, inner] of inside(api, schema)) {
    if (!inner.properties) continue;
    details.append(make("p", name.split("/").pop(), "quiet"), fieldList(inner));
  }
  return details;
}

function endpoint(api, path, method, operation) {
  const section = make("section");
  const heading = make("h2");
  heading.append(make("span", method.toUpperCase(), "method"), make("code", path));
  section.append(heading, make("p", operation.description ?? operation.summary ?? ""));
  for (const { label, source } of operation["x-codeSamples"] ?? []) {
    const details = make("details");
    details.open = label === "curl";
    details.append(make("summary", label), make("pre", source.replace(EXAMPLE_ORIGIN, location.origin)));
    section.append(details);
  }
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  if (body) section.append(structure(api, "Body", body, false));
  for (const [status, response] of Object.entries(operation.responses)) {
    if (!status.startsWith("2")) continue;
    const reply = response.content?.["application/json"]?.schema;
    if (reply?.$ref) section.append(structure(api, "Reply", reply, false));
    const event = response.content?.["text/event-stream"]?.["x-event"];
    if (event) section.append(structure(api, "Each event of a stream", event, false));
  }
  return section;
}

async function show() {
  const place = document.getElementById("endpoints");
  const response = await fetch("/openapi.json");
  if (!response.ok) {
    place.textContent = `The server answered with status ${response.status}.`;
    return;
  }
  const api = await response.json();
  document.getElementById("about").append(
    ...api.info.description.split("\n\n").map((text) => make("p", text.replaceAll("`", ""))),
  );
  place.textContent = "";
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      place.append(endpoint(api, path, method, operation));
    }
  }
}

show();
