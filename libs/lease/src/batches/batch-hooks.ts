import { InvalidBatchError, InvalidJobError } from '../errors';
import type { HandlerClass } from '../handlers/handler.types';
import type { JobEnqueue } from '../jobs/job-enqueue';
import { TRANSACTION_KEYS } from '../storage/caller-transaction';
import { errorText } from '../storage/sql-errors';
import type { BatchEnd, BatchHook, BatchOptions } from './batch.types';

const HOOKS = ['onCompleted', 'onFailed', 'onFinished'] as const;

/** A hook as it stands in the database, which makes a job of it. */
export interface StoredHook {
  on: 'completed' | 'failed' | 'finished';
  head: unknown;
  payload: object;
}

/**
 * Checks the hooks of a batch as the jobs that they will be, so that nothing is left to be refused at its end.
 * @throws InvalidBatchError naming the hook's field
 */
export async function hooksOf(name: string, options: BatchOptions, enqueue: JobEnqueue): Promise<StoredHook[]> {
  const hooks: StoredHook[] = [];
  for (const field of HOOKS) {
    const given = options[field];
    if (given === undefined) continue;
    const on = field.slice(2).toLowerCase() as StoredHook['on'];
    hooks.push({ on, ...(await hookOf(field, given, name, enqueue)) });
  }
  return hooks;
}

async function hookOf(
  field: string,
  given: BatchHook | HandlerClass,
  name: string,
  enqueue: JobEnqueue,
): Promise<Pick<StoredHook, 'head' | 'payload'>> {
  const hook: BatchHook = typeof given === 'function' ? { handler: given } : given;
  if (typeof hook !== 'object' || hook === null) {
    throw new InvalidBatchError(`${field} must be a handler class, or { handler, payload?, … }`, field);
  }
  const { handler, payload = {}, ...rest } = hook;
  const wrong = ['key', 'keyMode', 'keyScope', ...TRANSACTION_KEYS].find((key) => key in rest);
  if (wrong) {
    throw new InvalidBatchError(
      `${field}: '${wrong}' is not for a hook, which runs once for each end`,
      `${field}.${wrong}`,
    );
  }
  const stored = asJson(field, payload);
  if (typeof stored !== 'object' || Array.isArray(stored) || stored === null || 'batch' in stored) {
    throw new InvalidBatchError(
      `${field}: payload must be an object, as JSON too, without a field 'batch', which says how the batch has ended`,
      `${field}.payload`,
    );
  }
  try {
    const job = await enqueue.prepare(handler, { ...stored, batch: { ...LONGEST, name } }, rest);
    return { head: JSON.parse(`${job.json}}`), payload: stored };
  } catch (error) {
    if (!(error instanceof InvalidJobError)) throw error;
    throw new InvalidBatchError(`${field}: ${error.message}`, `${field}.${error.field}`, [], { cause: error });
  }
}

/** What is stored of it: a URL is a text, a Map is empty. */
function asJson(field: string, payload: unknown): unknown {
  try {
    return JSON.parse(JSON.stringify(payload) ?? 'null');
  } catch (error) {
    throw new InvalidBatchError(
      `${field}: the payload cannot be written as JSON: ${errorText(error)}`,
      `${field}.payload`,
      [],
      { cause: error },
    );
  }
}

/** The longest that may be said of an end. */
const LONGEST: BatchEnd = {
  id: '9223372036854775807',
  name: '',
  status: 'completed',
  generation: 2_147_483_647,
  completed: 2_147_483_647,
  failed: 2_147_483_647,
  cancelled: 2_147_483_647,
};
