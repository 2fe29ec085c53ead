import { InvalidOptionError } from '../errors';
import { DURATION_SYNTAX, parseDuration } from './duration';
import { didYouMean } from './suggest';

/** Checks and converts one option's value; throws InvalidOptionError naming `path`. */
export type Validator<T> = (value: unknown, path: string) => T;

export const refuse = (path: string, value: unknown, allowed: string): never => {
  throw new InvalidOptionError(`${path} = ${show(value)} is not allowed: it must be ${allowed}`);
};

const show = (value: unknown): string => {
  if (typeof value === 'function') return 'a function';
  try {
    const text = JSON.stringify(value);
    return text === undefined ? String(value) : text.length > 80 ? `${text.slice(0, 80)}…` : text;
  } catch {
    return Object.prototype.toString.call(value);
  }
};

export const integer =
  (min: number, max: number): Validator<number> =>
  (value, path) =>
    typeof value === 'number' && Number.isInteger(value) && value >= min && value <= max
      ? value
      : refuse(path, value, `a whole number from ${min} to ${max}`);

export const duration =
  (minMs: number, maxMs: number): Validator<number> =>
  (value, path) => {
    const ms = parseDuration(value);
    return ms !== undefined && ms >= minMs && ms <= maxMs
      ? ms
      : refuse(path, value, `a duration from ${minMs} to ${maxMs} ms (${DURATION_SYNTAX})`);
  };

/** A duration, or a word that means that there is none (null). */
export const durationOr =
  (none: string, minMs: number, maxMs: number): Validator<number | null> =>
  (value, path) => {
    if (value === none) return null;
    const ms = parseDuration(value);
    return ms !== undefined && ms >= minMs && ms <= maxMs
      ? ms
      : refuse(path, value, `'${none}' or a duration from ${minMs} to ${maxMs} ms (${DURATION_SYNTAX})`);
  };

export const boolean: Validator<boolean> = (value, path) =>
  typeof value === 'boolean' ? value : refuse(path, value, 'true or false');

export const oneOf =
  <T extends string>(...allowed: T[]): Validator<T> =>
  (value, path) => {
    const found = allowed.find((candidate) => candidate === value);
    return (
      found ??
      refuse(
        path,
        value,
        `one of ${allowed.map((a) => `'${a}'`).join(', ')}${typeof value === 'string' ? didYouMean(value, allowed) : ''}`,
      )
    );
  };

/** Names of queues, kinds, tags, workers: non-empty, bounded, storable. */
export const name =
  (maxBytes = 200): Validator<string> =>
  (value, path) =>
    isName(value, maxBytes)
      ? value
      : refuse(path, value, `text of 1 to ${maxBytes} bytes without NUL or lone surrogates`);

export const isName = (value: unknown, maxBytes = 200): value is string =>
  typeof value === 'string' &&
  value !== '' &&
  Buffer.byteLength(value) <= maxBytes &&
  !value.includes('\0') &&
  value.isWellFormed();

export const listOf =
  <T>(item: Validator<T>): Validator<T[]> =>
  (value, path) =>
    Array.isArray(value) && value.length > 0
      ? value.map((element, i) => item(element, `${path}[${i}]`))
      : refuse(path, value, 'a list with at least one element');

export const object: Validator<Record<string, unknown>> = (value, path) =>
  typeof value === 'object' && value !== null && !Array.isArray(value)
    ? (value as Record<string, unknown>)
    : refuse(path, value, 'an object');

/** Refuses keys that nobody reads: a misspelt option must not be silently ignored. */
export function knownKeys(value: Record<string, unknown>, path: string, known: readonly string[]): void {
  for (const key of Object.keys(value)) {
    if (!known.includes(key)) {
      const at = path === '' ? key : `${path}.${key}`;
      throw new InvalidOptionError(
        `There is no option '${at}'${didYouMean(key, known)} Allowed here: ${known.join(', ')}`.replace(
          /' Allowed/,
          "'. Allowed",
        ),
      );
    }
  }
}
