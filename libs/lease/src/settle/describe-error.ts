import type { JobError } from '../jobs/job.types';

const MESSAGE_CHARS = 4000;
const STACK_CHARS = 8000;
const MAX_NESTED = 5;

/**
 * Makes a storable error of whatever a handler threw: undefined, strings, frozen objects, getters that throw, stacks of
 * megabytes. Never throws itself, since the failure must be recorded in any case (law 4, F:D8).
 */
export function describeError(thrown: unknown, depth = 0): JobError {
  try {
    if (thrown instanceof Error || isErrorLike(thrown)) return describeErrorObject(thrown as Error, depth);
    return { name: 'NonError', message: clip(`threw ${describeValue(thrown)}`, MESSAGE_CHARS) };
  } catch {
    return { name: 'Unreadable', message: 'threw something whose properties cannot be read' };
  }
}

const isErrorLike = (value: unknown): boolean =>
  typeof value === 'object' && value !== null && typeof read(value, 'message') === 'string';

function describeErrorObject(error: Error, depth: number): JobError {
  const name = read(error, 'name');
  const message = read(error, 'message');
  const stack = read(error, 'stack');
  const code = read(error, 'code');
  const cause = read(error, 'cause');
  const errors = read(error, 'errors');
  return {
    name: clip(typeof name === 'string' ? name : 'Error', 200),
    message: clip(typeof message === 'string' && message !== '' ? message : 'no message', MESSAGE_CHARS),
    ...(typeof stack === 'string' ? { stack: clip(stack, STACK_CHARS) } : {}),
    ...(typeof code === 'string' || typeof code === 'number' ? { code: clip(String(code), 200) } : {}),
    ...(cause !== undefined && depth < 3 ? { cause: describeError(cause, depth + 1) } : {}),
    ...(Array.isArray(errors) && depth < 3
      ? { errors: errors.slice(0, MAX_NESTED).map((nested) => describeError(nested, depth + 1)) }
      : {}),
  };
}

function read(value: object, key: string): unknown {
  try {
    return (value as Record<string, unknown>)[key];
  } catch {
    return undefined;
  }
}

function describeValue(value: unknown): string {
  if (typeof value === 'string') return JSON.stringify(clip(value, MESSAGE_CHARS));
  if (typeof value === 'symbol' || typeof value === 'function') return String(value);
  try {
    return JSON.stringify(value) ?? String(value);
  } catch {
    return Object.prototype.toString.call(value);
  }
}

const clip = (text: string, limit: number): string =>
  storable(text.length > limit ? `${text.slice(0, limit)}… (${text.length} characters)` : text);

/** PostgreSQL stores neither NUL nor lone surrogates in text. */
export const storable = (text: string): string => text.toWellFormed().replaceAll('\0', '\ufffd');
