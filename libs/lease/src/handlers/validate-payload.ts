import type { Type } from '@nestjs/common';
import { plainToInstance } from 'class-transformer';
import { type ValidationError, validate } from 'class-validator';
import { InvalidJobError } from '../errors';

/**
 * Checks a payload against its DTO class and returns it as an instance of it.
 * @throws InvalidJobError naming the first field that is wrong, and every constraint that it breaks
 */
export async function validatePayload(dto: Type<object>, payload: unknown, what: string): Promise<object> {
  if (typeof payload !== 'object' || payload === null || Array.isArray(payload)) {
    throw new InvalidJobError(`${what}: the payload must be an object of ${dto.name}`, 'payload');
  }
  const instance = plainToInstance(dto, payload);
  const errors = await validate(instance, { whitelist: false, forbidUnknownValues: false });
  const problems = errors.flatMap((error) => describe(error, 'payload'));
  const [first] = problems;
  if (first) {
    throw new InvalidJobError(
      `${what}: ${problems.map(({ path, text }) => `${path}: ${text}`).join('; ')}`,
      first.path,
    );
  }
  return instance;
}

const describe = (error: ValidationError, parent: string): { path: string; text: string }[] => {
  const path = `${parent}.${error.property}`;
  const own = Object.values(error.constraints ?? {});
  return [
    ...(own.length > 0 ? [{ path, text: own.join(', ') }] : []),
    ...(error.children ?? []).flatMap((child) => describe(child, path)),
  ];
};
