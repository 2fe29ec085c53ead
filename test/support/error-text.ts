import { inspect } from 'node:util';

/** The message of anything thrown. Errors of Node's own modules are no `instanceof Error` inside jest. */
export function errorText(error: unknown): string {
  if (typeof error === 'object' && error !== null && 'message' in error && typeof error.message === 'string') {
    return error.message === '' ? inspect(error) : error.message;
  }
  return inspect(error);
}
