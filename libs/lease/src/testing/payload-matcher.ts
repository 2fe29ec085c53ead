import { inspect } from 'node:util';
import type { JobStatus } from '../jobs/job.types';

/** A matcher such as `expect.any(String)`: of Jest, of Vitest, or of your own. */
export interface AsymmetricMatcher {
  asymmetricMatch(other: unknown): boolean;
}

/** Some of the fields of a payload, at any depth. Lists are compared element by element and must be as long. */
export type PartialPayload<P> = P extends (infer E)[]
  ? PartialPayload<E>[]
  : P extends Date
    ? Date | string
    : P extends object
      ? { [K in keyof P]?: PartialPayload<P[K]> | AsymmetricMatcher | RegExp }
      : P;

/** What a payload must be like: some of its fields, a matcher, or a function that says so. A RegExp is tried on text, a Date is compared as JSON has it. */
export type PayloadMatcher<P> =
  | ((payload: P, job: JobStatus<P>) => boolean)
  | AsymmetricMatcher
  | ([unknown] extends [P] ? string | number | boolean | null | object : PartialPayload<P>);

/** In what a job differs from what is wanted, in words; none: it fits. */
export function mismatches(matcher: unknown, job: JobStatus): string[] {
  if (matcher === undefined) return [];
  if (typeof matcher !== 'function') return differences(matcher, job.payload, 'payload');
  return (matcher as (payload: unknown, job: JobStatus) => boolean)(job.payload, job)
    ? []
    : ['the function says that it does not fit'];
}

function differences(wanted: unknown, found: unknown, path: string): string[] {
  const differs = [`${path} is ${show(found)}, not ${show(wanted)}`];
  if (isAsymmetric(wanted)) return wanted.asymmetricMatch(found) ? [] : differs;
  if (wanted instanceof RegExp) return typeof found === 'string' && wanted.test(found) ? [] : differs;
  if (Array.isArray(wanted)) {
    if (!Array.isArray(found) || found.length !== wanted.length) return differs;
    return wanted.flatMap((element, i) => differences(element, found[i], `${path}[${i}]`));
  }
  if (typeof wanted !== 'object' || wanted === null) return Object.is(wanted, found) ? [] : differs;
  if ('toJSON' in wanted && typeof wanted.toJSON === 'function') {
    return differences((wanted as { toJSON(): unknown }).toJSON(), found, path);
  }
  if (typeof found !== 'object' || found === null || Array.isArray(found)) return differs;
  return Object.entries(wanted).flatMap(([key, value]) =>
    differences(value, (found as Record<string, unknown>)[key], `${path}.${key}`),
  );
}

const isAsymmetric = (value: unknown): value is AsymmetricMatcher =>
  typeof value === 'object' &&
  value !== null &&
  typeof (value as Partial<AsymmetricMatcher>).asymmetricMatch === 'function';

/** One line, not too long for a message. */
export function show(value: unknown): string {
  const text = inspect(named(value, 0), { depth: 6, breakLength: Infinity, maxStringLength: 200, maxArrayLength: 20 });
  return text.length > 300 ? `${text.slice(0, 300)}…` : text;
}

/** Asymmetric matchers by the names that their libraries give them, such as `Any<String>`. */
function named(value: unknown, depth: number): unknown {
  if (typeof value !== 'object' || value === null || depth > 6) return value;
  if (isAsymmetric(value)) {
    const { toAsymmetricMatcher } = value as { toAsymmetricMatcher?: () => string };
    const name = typeof toAsymmetricMatcher === 'function' ? toAsymmetricMatcher.call(value) : 'a matcher';
    return { [inspect.custom]: () => name };
  }
  if (Array.isArray(value)) return value.map((element) => named(element, depth + 1));
  if (Object.getPrototypeOf(value) !== Object.prototype) return value;
  return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, named(inner, depth + 1)]));
}
