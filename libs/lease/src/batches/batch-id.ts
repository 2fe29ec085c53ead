import { InvalidBatchError } from '../errors';

/** @throws InvalidBatchError unless it is a bigint above zero as decimal text */
export function assertBatchId(id: unknown, field = 'id'): asserts id is string {
  if (typeof id === 'string' && /^[1-9]\d{0,18}$/.test(id) && BigInt(id) <= 9_223_372_036_854_775_807n) return;
  throw new InvalidBatchError(`${field} = ${JSON.stringify(id)} is no batch id: ids are decimal text`, field);
}
